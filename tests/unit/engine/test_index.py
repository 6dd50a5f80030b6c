"""Prefix index over real pools."""

from engine.memory import KVMemory
from engine.prefix import KeyChain, PrefixIdentity

IDENTITY = PrefixIdentity("weights-1", "layout-1", "exact", 4)


def chain_of(tokens: tuple[int, ...], salt: bytes = b"") -> KeyChain:
    chain = KeyChain(salt, IDENTITY)
    chain.grow(tokens)
    return chain


def cache(memory: KVMemory, chain: KeyChain, anchor_at: int | None = None) -> tuple[int, ...]:
    """Put every block of `chain` into the index, as a request that has just ended would."""
    blocks, slots = memory.take(len(chain.keys), 1)
    memory.index.insert(chain, 0, blocks)
    if anchor_at is not None:
        memory.index.anchor(chain, anchor_at, slots[0])
    memory.give(blocks, slots)
    return blocks


def test_a_hit_ends_at_the_last_anchor_and_leaves_a_token_to_compute() -> None:
    memory = KVMemory(8, 4, 4)
    tokens = tuple(range(12))
    blocks = cache(memory, chain_of(tokens), anchor_at=1)
    hit = memory.hit(chain_of(tokens), 12)
    assert hit.blocks == blocks[:2] and hit.anchor_slot is not None
    memory.give(hit.blocks, (hit.anchor_slot,))
    assert memory.hit(chain_of(tokens[:8]), 8).blocks == ()  # the anchor stands at the prompt's very end
    assert memory.match(chain_of(tokens)) == blocks


def test_no_anchor_no_hit_but_still_a_match() -> None:
    memory = KVMemory(8, 4, 4)
    tokens = tuple(range(12))
    blocks = cache(memory, chain_of(tokens))
    assert memory.hit(chain_of(tokens), 12).blocks == ()
    assert memory.match(chain_of(tokens)) == blocks


def test_without_window_groups_every_block_ends_a_hit_and_no_anchor_is_kept() -> None:
    memory = KVMemory(8, 4, 4, anchored=False)
    tokens = tuple(range(14))
    blocks = cache(memory, chain_of(tokens), anchor_at=1)
    assert memory.index.anchors == 0 and not memory.index.wants_anchor(chain_of(tokens), 0)
    for count, expected in ((14, 3), (12, 2), (9, 2), (8, 1), (4, 0)):
        hit = memory.hit(chain_of(tokens[:count]), count)
        assert (hit.blocks, hit.anchor_slot) == (blocks[:expected], None)
        memory.give(hit.blocks)
    memory.check_idle()


def test_a_key_collision_never_serves_other_tokens() -> None:
    memory = KVMemory(8, 4, 4)
    mine, theirs = chain_of(tuple(range(12))), chain_of(tuple(range(50, 62)))
    cache(memory, mine, anchor_at=2)
    theirs.keys = list(mine.keys)
    assert memory.match(theirs) == ()
    cached = len(memory.index)
    cache(memory, theirs)
    assert len(memory.index) == cached, "the first writer keeps the key"


def test_a_collision_in_a_later_block_needs_the_same_parents() -> None:
    memory = KVMemory(12, 4, 4)
    mine = chain_of((1, 1, 1, 1, 7, 7, 7, 7))
    theirs = chain_of((2, 2, 2, 2, 7, 7, 7, 7))
    cache(memory, mine)
    cache(memory, theirs)
    crossed = chain_of((2, 2, 2, 2, 7, 7, 7, 7))
    crossed.keys = [theirs.keys[0], mine.keys[1]]
    assert len(memory.match(crossed)) == 1


def test_leaves_leave_first_and_the_least_recently_used_of_them() -> None:
    memory = KVMemory(6, 4, 4)
    old, new = chain_of(tuple(range(12))), chain_of(tuple(range(20, 32)))
    cache(memory, old)
    cache(memory, new)
    memory.index.match(old)  # now `new` is the colder one
    memory.take(2)
    assert (len(memory.index.match(new)), len(memory.index.match(old))) == (1, 3)  # asking uses them: `old` last
    memory.take(2)
    assert (len(memory.index.match(new)), len(memory.index.match(old))) == (0, 2)


def test_a_held_prefix_is_not_evicted() -> None:
    memory = KVMemory(4, 4, 4)
    chain = chain_of(tuple(range(12)))
    cache(memory, chain)
    held = memory.match(chain_of(tuple(range(8))))
    assert not memory.can_take(3) and memory.can_take(2)
    memory.take(2)
    assert memory.index.match(chain) == held
    memory.check()


def test_anchors_give_way_to_live_sequences_and_the_coldest_goes_first() -> None:
    memory = KVMemory(8, 2, 4)
    one, two = chain_of(tuple(range(8))), chain_of(tuple(range(20, 28)))
    cache(memory, one, anchor_at=0)
    cache(memory, two, anchor_at=0)
    hit = memory.index.hit(one, 8, 4)
    assert hit.anchor_slot is not None
    memory.take(0, 1)
    assert memory.index.hit(one, 8, 4).anchor_slot == hit.anchor_slot
    assert memory.index.hit(two, 8, 4).anchor_slot is None


def test_evicting_a_block_takes_its_anchor_along() -> None:
    memory = KVMemory(2, 2, 4)
    cache(memory, chain_of(tuple(range(8))), anchor_at=1)
    memory.take(2)
    assert (memory.slots.free, memory.index.anchors, len(memory.index)) == (2, 0, 0)


def test_distrusted_chains_are_gone_with_everything_that_continues_them() -> None:
    memory = KVMemory(8, 4, 4)
    cache(memory, chain_of(tuple(range(12))), anchor_at=1)
    memory.index.distrust(chain_of(tuple(range(4))))
    assert (len(memory.index), memory.blocks.free, memory.slots.free) == (0, 8, 4)
