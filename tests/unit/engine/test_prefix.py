"""Prefix keys."""

from dataclasses import replace

import pytest

from engine.prefix import ImageMark, KeyChain, PrefixIdentity, block_keys

IDENTITY = PrefixIdentity("weights-1", "layout-1", "exact", 4)
TOKENS = tuple(range(12))


def test_only_full_blocks_get_keys_and_growing_keeps_them() -> None:
    assert len(block_keys(b"salt", TOKENS[:11], IDENTITY)) == 2
    chain = KeyChain(b"salt", IDENTITY)
    for end in range(13):
        chain.grow(TOKENS[:end])
    assert chain.keys == block_keys(b"salt", TOKENS, IDENTITY)
    assert {len(key) for key in chain.keys} == {32}
    assert (chain.parent(0), chain.parent(1)) == (bytes(32), chain.keys[0])


@pytest.mark.parametrize(
    "other",
    [
        block_keys(b"tenant", TOKENS, IDENTITY),
        block_keys(b"salt", (99, *TOKENS[1:]), IDENTITY),
        *(
            block_keys(b"salt", TOKENS, replace(IDENTITY, **{field: "other"}))
            for field in ("model_revision", "layout_fingerprint", "window_policy")
        ),
        block_keys(b"salt", TOKENS, IDENTITY, [ImageMark(1, b"i" * 32)]),
    ],
)
def test_another_tenant_token_model_layout_policy_or_image_shares_no_key(other: list[bytes]) -> None:
    assert not set(other) & set(block_keys(b"salt", TOKENS, IDENTITY))


def test_fields_cannot_be_shifted_into_each_other() -> None:
    one = block_keys(b"", TOKENS, PrefixIdentity("ab", "c", "exact", 4))
    two = block_keys(b"", TOKENS, PrefixIdentity("a", "bc", "exact", 4))
    assert one != two


def test_an_image_changes_its_block_and_all_after_it_but_none_before() -> None:
    plain, marked = block_keys(b"", TOKENS, IDENTITY), block_keys(b"", TOKENS, IDENTITY, [ImageMark(5, b"i" * 32)])
    assert plain[0] == marked[0]
    assert plain[1] != marked[1] and plain[2] != marked[2]
    assert marked != block_keys(b"", TOKENS, IDENTITY, [ImageMark(5, b"j" * 32)])
