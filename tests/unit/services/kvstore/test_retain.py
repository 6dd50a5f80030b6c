"""Retention: budgets per tenant and class are real, soft, and never keep the tier from taking what is new."""

from __future__ import annotations

import pytest

from fabric.errors import InvalidArgument
from fabric.retention import RetentionClass
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import kvstore_pb2 as pb
from services.kvstore import wire
from services.kvstore.policy.budget import Budgets, Owner
from services.kvstore.policy.retention import KEEP_S, LONGEST_S
from services.kvstore.records import ROOT, Identity, Record, RecordId, RecordKind
from services.kvstore.tier import DramTier
from tests.support.clock import FakeClock

SIZE = 64
ANN, BOB = Owner("ann", RetentionClass.CHAT), Owner("bob", RetentionClass.CHAT)


def key(number: int) -> bytes:
    return number.to_bytes(32)


def tier_of(records: int, owner: int, total: int) -> DramTier:
    """Room for so many records, of which one owner and all together may have these promised."""
    return DramTier(records * SIZE, FakeClock(), budgets=Budgets(owner * SIZE, total * SIZE))


def put(tier: DramTier, number: int, parent: int = 0) -> bool:
    place = tier.take(SIZE)
    if place is None:
        return False
    name = RecordId(RecordKind.BLOCK, key(number))
    return tier.admit(Record(name, Identity("rev", "layout"), b"", key(parent) if parent else ROOT, place, SIZE, ()))


def promised(tier: DramTier, *numbers: int) -> list[int]:
    standings = {number: tier.standing(RecordId(RecordKind.BLOCK, key(number))) for number in numbers}
    return [number for number, found in standings.items() if found is not None and found.owner is not None]


def held(tier: DramTier) -> set[int]:
    return {int.from_bytes(record.key) for record in tier.ids}


def test_what_a_tenant_retains_outlives_what_others_put() -> None:
    tier = tier_of(4, 2, 3)
    for number in (1, 2):
        assert put(tier, number)
    assert list(tier.retain([key(1)], 60.0, 10 * SIZE, ANN).values()) == [SIZE]
    for number in range(3, 10):
        assert put(tier, number), "a promise keeps nothing new out"
    assert 1 in held(tier) and 2 not in held(tier)


def test_beyond_its_budget_a_tenant_keeps_the_start_of_a_prefix_and_costs_others_nothing() -> None:
    tier = tier_of(8, 2, 4)
    for number in (1, 2, 3):
        put(tier, number, number - 1)
    put(tier, 7)
    assert list(tier.retain([key(7)], 60.0, 10 * SIZE, BOB).values()) == [SIZE]
    assert list(tier.retain([key(1), key(2), key(3)], 60.0, 10 * SIZE, ANN).values()) == [SIZE, SIZE]
    assert promised(tier, 1, 2, 3, 7) == [1, 2, 7]
    assert list(tier.retain([key(3)], 60.0, 10 * SIZE, Owner("ann", RetentionClass.AGENT)).values()) == [SIZE], (
        "each class its own"
    )


def test_a_call_keeps_no_more_bytes_than_it_says() -> None:
    tier = tier_of(8, 4, 4)
    for number in (1, 2, 3):
        put(tier, number, number - 1)
    assert list(tier.retain([key(1), key(2), key(3)], 60.0, 2 * SIZE - 1, ANN).values()) == [SIZE]
    assert promised(tier, 1, 2, 3) == [1]


def test_a_tier_whose_records_are_all_promised_still_takes_what_is_new() -> None:
    tier = tier_of(3, 3, 3)
    for number in (1, 2, 3):
        put(tier, number)
    assert len(tier.retain([key(1), key(2), key(3)], 1e9, 10 * SIZE, ANN)) == 3
    assert put(tier, 4)


def request(**fields: object) -> pb.RetainRequest:
    return pb.RetainRequest(**{"keys": [key(1)], "owner": b"o" * 16} | fields)  # type: ignore[arg-type]


def test_a_class_decides_how_long_and_whose_budget() -> None:
    keep = wire.unpack_keep(request(retention=common.RETENTION_CLASS_AGENT), 1 << 30)
    assert keep.keep_s == KEEP_S[RetentionClass.AGENT] and keep.most_bytes == 1 << 30
    assert keep.owner == Owner((b"o" * 16).hex(), RetentionClass.AGENT)
    assert wire.unpack_keep(request(keep_ms=5000, budget_bytes=9), 1 << 30).keep_s == 5.0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "keep_ms"),
        ({"keep_ms": round(LONGEST_S * 1000) + 1}, "keep_ms"),
        ({"keep_ms": 1, "keys": [b"short"]}, "keys"),
        ({"keep_ms": 1, "owner": b"ann"}, "owner"),
        ({"keep_ms": 1, "retention": 9}, "retention"),
    ],
)
def test_a_retain_that_cannot_be_is_refused_by_name(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        wire.unpack_keep(request(**fields), 1 << 30)
    assert caught.value.field == field and caught.value.fix


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, bytes(32)),
        ({"first_block": 3}, None),
        ({"first_block": 3, "parent_key": key(2)}, key(2)),
    ],
)
def test_a_read_says_what_its_first_block_continues(fields: dict[str, object], expected: bytes | None) -> None:
    assert wire.unpack_parent(pb.GetRequest(**fields)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"parent_key": key(2)}, {"first_block": 1, "parent_key": b"short"}])
def test_a_read_that_continues_what_it_cannot_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        wire.unpack_parent(pb.GetRequest(**fields))  # type: ignore[arg-type]
    assert caught.value.field == "parent_key"
