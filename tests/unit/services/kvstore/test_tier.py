"""The DRAM tier may miss, never lies, and evicts leaves before what they continue."""

from __future__ import annotations

import pytest
import xxhash

from fabric.records import Extent
from fabric.retention import RetentionClass
from services.kvstore.policy.budget import NOBODY
from services.kvstore.policy.retention import KEEP_S, Retention
from services.kvstore.records import ROOT, BlockName, Identity, Record, RecordId, RecordKind
from services.kvstore.tier import DramTier

IDENTITY = Identity("rev", "layout")
SIZE = 128


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def name(index: int) -> BlockName:
    return BlockName(bytes([index]) * 32, bytes([index]) * 8)


def store(tier: DramTier, index: int, parent: bytes = ROOT, kind: RecordKind = RecordKind.BLOCK) -> Record:
    offset = tier.take(SIZE)
    assert offset is not None
    tier.memory[offset : offset + SIZE] = index
    digest = xxhash.xxh3_64_intdigest(tier.memory[offset : offset + SIZE])
    named = name(index)
    extents = (Extent("csa", 0, 1, 0, SIZE, digest),)
    record = Record(RecordId(kind, named.key), IDENTITY, named.tokens, parent, offset, SIZE, extents)
    assert tier.admit(record)
    return record


def chain(tier: DramTier, *indices: int) -> list[Record]:
    records: list[Record] = []
    for index in indices:
        records.append(store(tier, index, records[-1].id.key if records else ROOT))
    return records


def test_lookup_tells_leading_blocks_and_the_last_anchor() -> None:
    tier = DramTier(10 * SIZE, Clock())
    chain(tier, 1, 2, 3)
    store(tier, 2, kind=RecordKind.ANCHOR)
    held = tier.lookup([name(1), name(2), name(3), name(4)], IDENTITY)
    assert (held.blocks, held.anchored) == (3, 2)


def test_equal_key_with_other_tokens_or_identity_is_a_miss() -> None:
    tier = DramTier(10 * SIZE, Clock())
    chain(tier, 1)
    assert tier.lookup([BlockName(name(1).key, b"other")], IDENTITY).blocks == 0
    assert tier.lookup([name(1)], Identity("other", "layout")).blocks == 0


def test_leaves_leave_before_what_they_continue() -> None:
    tier = DramTier(3 * SIZE, Clock())
    chain(tier, 1, 2, 3)
    store(tier, 9)
    assert tier.lookup([name(1), name(2), name(3)], IDENTITY).blocks == 2
    store(tier, 8)
    assert tier.lookup([name(1), name(2)], IDENTITY).blocks == 1


def test_a_used_prefix_outlives_an_unused_one() -> None:
    tier = DramTier(4 * SIZE, Clock())
    chain(tier, 1, 2)
    chain(tier, 3, 4)
    read = tier.collect([name(1), name(2)], IDENTITY, anchor=False)
    assert tier.use(read) == read
    store(tier, 9)
    assert tier.lookup([name(1), name(2)], IDENTITY).blocks == 2
    assert tier.lookup([name(3), name(4)], IDENTITY).blocks == 1


def test_what_left_before_its_use_was_told_is_passed_over() -> None:
    tier = DramTier(4 * SIZE, Clock())
    chain(tier, 1, 2)
    kept, gone = tier.collect([name(1), name(2)], IDENTITY, anchor=False)
    tier.drop(gone)
    assert tier.use([kept, gone]) == [kept]
    chain(tier, 2)  # another record of that name
    assert tier.use([kept, gone]) == [kept]


def test_retained_records_leave_last_but_never_wedge_the_store() -> None:
    clock = Clock()
    tier = DramTier(2 * SIZE, clock)
    chain(tier, 1)
    assert list(tier.retain([name(1).key], keep_s=60, budget_bytes=SIZE, owner=NOBODY).values()) == [SIZE]
    chain(tier, 2)
    store(tier, 3)
    assert tier.lookup([name(1)], IDENTITY).blocks == 1  # 2 left although 1 is older
    tier.retain([name(3).key], keep_s=60, budget_bytes=SIZE, owner=NOBODY)
    store(tier, 4)
    assert len(tier) == 2  # all were retained, and there was room nevertheless


def test_retention_ends_with_its_time_and_stops_at_its_budget() -> None:
    clock = Clock()
    tier = DramTier(2 * SIZE, clock)
    chain(tier, 1)
    store(tier, 2)
    assert list(tier.retain([name(1).key, name(2).key], keep_s=60, budget_bytes=SIZE, owner=NOBODY).values()) == [SIZE]
    clock.now = 61.0
    store(tier, 3)
    assert tier.lookup([name(1)], IDENTITY).blocks == 0


def test_pinned_bytes_stay_until_the_last_pin_even_when_dropped() -> None:
    tier = DramTier(2 * SIZE, Clock())
    record = store(tier, 1)
    with tier.pinned([record]), tier.pinned([record]):
        tier.drop(record)
        assert tier.lookup([name(1)], IDENTITY).blocks == 0
        other = tier.take(SIZE)
        assert other is not None and other != record.offset
        assert tier.take(SIZE) is None
    assert tier.take(SIZE) == record.offset


def test_a_damaged_record_is_noticed() -> None:
    tier = DramTier(2 * SIZE, Clock())
    record = store(tier, 1)
    assert tier.is_intact(record)
    tier.memory[record.offset + 17] ^= 1
    assert not tier.is_intact(record)


def test_the_first_record_of_a_name_wins() -> None:
    tier = DramTier(4 * SIZE, Clock())
    first = store(tier, 1)
    offset = tier.take(SIZE)
    assert offset is not None
    again = Record(first.id, IDENTITY, first.tokens, ROOT, offset, SIZE, first.extents)
    assert not tier.admit(again)
    assert tier.used == SIZE


def test_what_is_larger_than_the_tier_evicts_nothing() -> None:
    tier = DramTier(2 * SIZE, Clock())
    chain(tier, 1)
    assert tier.take(3 * SIZE) is None
    assert len(tier) == 1


@pytest.mark.parametrize("times", [0.5, 1.0, 2.0])
def test_an_anchor_is_kept_its_own_time_and_its_block_never_leaves_before_it(times: float) -> None:
    clock = Clock()
    tier = DramTier(4 * SIZE, clock, retention=Retention(times))
    block = store(tier, 1)
    anchor = store(tier, 1, kind=RecordKind.ANCHOR)
    kept_s = KEEP_S[RetentionClass.DEFAULT]
    for after, expected in (
        (0.9 * min(times, 1.0), {block.id, anchor.id}),
        (1.1 * times, {block.id} if times < 1 else set()),
        (1.2 * max(times, 1.0), set()),
    ):
        clock.now = after * kept_s
        tier.drop_idle()
        assert set(tier.ids) == expected


def test_a_promise_of_an_anchor_is_scaled_too() -> None:
    clock = Clock()
    tier = DramTier(8 * SIZE, clock, retention=Retention(0.5))
    store(tier, 1)
    anchor = store(tier, 1, kind=RecordKind.ANCHOR)
    assert list(tier.retain([name(1).key], 100.0, 4 * SIZE, NOBODY).values()) == [SIZE, SIZE]
    clock.now = 60.0
    assert tier._order.promised_bytes(clock.now) == SIZE, "the block's promise lasts, the anchor's is over"
    assert tier.by_id(anchor.id) is anchor


def test_a_block_that_is_found_damaged_takes_its_anchor_along_and_leaves_others() -> None:
    tier = DramTier(8 * SIZE, Clock())
    first, second = chain(tier, 1, 2)
    store(tier, 1, kind=RecordKind.ANCHOR)
    kept = store(tier, 2, kind=RecordKind.ANCHOR)
    tier.drop(first)
    assert set(tier.ids) == {second.id, kept.id} and tier.used == 2 * SIZE
