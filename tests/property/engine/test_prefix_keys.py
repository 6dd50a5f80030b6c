"""Block keys: whatever differs between two blocks differs in their keys, and no list of fields reads like another."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.layout import CacheGroup, GroupKind, Layout, ReplayPolicy
from engine.prefix import ImageMark, KeyChain, PrefixIdentity, RegionSalt, Salt, block_keys

BLOCK = 4
GROUPS = (
    CacheGroup("latent", GroupKind.GLOBAL, 2, BLOCK, 1, 8, "bf16", "1"),
    CacheGroup("window", GroupKind.WINDOW, 2, 6, 1, 8, "bf16", "1"),
)
LAYOUT = Layout(BLOCK, 2, GROUPS)


@dataclass(frozen=True)
class Named:
    """Everything that a block's key stands for."""

    salt: bytes
    parent: tuple[int, ...]  # tokens of the blocks before it
    tokens: tuple[int, ...]
    images: tuple[tuple[int, bytes], ...]  # position in the block, digest
    revision: str
    layout: str
    policy: str

    def key(self) -> bytes:
        identity = PrefixIdentity(self.revision, self.layout, self.policy, BLOCK)
        marks = [ImageMark(len(self.parent) + position, digest) for position, digest in self.images]
        return block_keys(self.salt, (*self.parent, *self.tokens), identity, marks)[-1]


token = st.integers(0, 3)
# Few and short values, so that bytes shift between neighbours and equal ones come up often.
text = st.text("ab", max_size=3)
blocks = st.lists(st.tuples(token, token, token, token), max_size=2).map(lambda found: sum(found, ()))
digests = st.sampled_from([b"i" * 32, b"j" * 32])
names = st.builds(
    Named,
    salt=text.map(str.encode),
    parent=blocks,
    tokens=st.tuples(token, token, token, token),
    images=st.lists(digests, max_size=2).map(lambda found: tuple(enumerate(found))),
    revision=text,
    layout=text,
    policy=text,
)
BASE = Named(b"salt", (1, 2, 3, 0), (0, 1, 2, 3), ((0, b"i" * 32),), "weights", LAYOUT.fingerprint, "exact")


@settings(max_examples=500)
@given(names, names)
@example(replace(BASE, revision="ab", layout="c"), replace(BASE, revision="a", layout="bc"))
@example(replace(BASE, revision="a", layout=""), replace(BASE, revision="", layout="a"))
@example(replace(BASE, layout="", policy="x"), replace(BASE, layout="x", policy=""))
def test_two_blocks_have_one_key_only_where_they_are_the_same(one: Named, other: Named) -> None:
    assert (one.key() == other.key()) == (one == other)


@given(names, names, st.sampled_from([each.name for each in fields(Named)]))
def test_changing_any_one_field_changes_the_key(one: Named, other: Named, field: str) -> None:
    changed = replace(one, **{field: getattr(other, field)})
    assert (changed.key() == one.key()) == (getattr(one, field) == getattr(other, field))


def test_every_record_version_policy_and_size_of_a_layout_is_in_its_keys() -> None:
    other_version = (replace(GROUPS[0], record_version="2"), GROUPS[1])
    layouts = [
        LAYOUT,
        replace(LAYOUT, groups=other_version),
        replace(LAYOUT, groups=(GROUPS[0], replace(GROUPS[1], record_version="2"))),
        replace(LAYOUT, groups=(replace(GROUPS[0], dtype="fp8"), GROUPS[1])),
        replace(LAYOUT, groups=GROUPS[:1]),
        replace(LAYOUT, max_rollback=3),
        replace(LAYOUT, replay=ReplayPolicy(6)),
        replace(LAYOUT, replay=ReplayPolicy(12, stacked=True)),
        replace(LAYOUT, replay=ReplayPolicy(6, decoder=True)),
    ]
    keys = {replace(BASE, layout=each.fingerprint, policy=each.window_policy).key() for each in layouts}
    assert len(keys) == len(layouts)


def test_blocks_of_another_size_share_no_key() -> None:
    tokens = tuple(range(8))
    keys = [block_keys(b"s", tokens, PrefixIdentity("w", "l", "exact", size)) for size in (2, 4, 8)]
    assert len({key for found in keys for key in found}) == 4 + 2 + 1


salts = st.sampled_from([b"ann", b"bob"])
regions = st.integers(0, 20)


def chain(salt: Salt, tokens: tuple[int, ...], images: tuple[ImageMark, ...] = ()) -> KeyChain:
    found = KeyChain(salt, PrefixIdentity("weights", "layout", "exact", BLOCK), images)
    found.grow(tokens)
    return found


@given(blocks.filter(bool), regions)
def test_blocks_wholly_inside_a_region_are_equal_for_all_who_share_it_and_no_other_block_is(
    tokens: tuple[int, ...], region: int
) -> None:
    ann, bob = (chain(RegionSalt(salt, b"desk", region), tokens) for salt in (b"ann", b"bob"))
    alone, inside = chain(b"ann", tokens), min(region // BLOCK, len(tokens) // BLOCK)
    shared = [one == other for one, other in zip(ann.keys, bob.keys, strict=True)]
    assert shared == [index < inside for index in range(len(shared))]
    assert not set(ann.keys[:inside]) & set(alone.keys)
    assert [content.salt for content in ann.contents] == [b"desk"] * inside + [b"ann"] * (len(shared) - inside)


@given(blocks.filter(bool), salts)
def test_a_region_of_no_tokens_changes_nothing(tokens: tuple[int, ...], salt: bytes) -> None:
    assert chain(RegionSalt(salt, b"desk", 0), tokens).keys == chain(salt, tokens).keys
    assert chain(RegionSalt(salt, b"desk", BLOCK - 1), tokens).keys == chain(salt, tokens).keys


@given(st.integers(0, 11))
def test_an_image_is_never_part_of_a_region(position: int) -> None:
    mark = (ImageMark(position, b"i" * 32),)
    ann, bob = (chain(RegionSalt(salt, b"desk", 12), tuple(range(12)), mark) for salt in (b"ann", b"bob"))
    shared = [one == other for one, other in zip(ann.keys, bob.keys, strict=True)]
    assert shared == [(index + 1) * BLOCK <= position for index in range(3)]
