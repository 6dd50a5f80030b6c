"""The index of segments finds the one of which least is wanted, and what is let go of can be read until it goes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fabric.retention import RetentionClass
from services.kvstore.nvme.files import Place
from services.kvstore.nvme.format import PAGE, Stored
from services.kvstore.nvme.index import SegmentIndex
from services.kvstore.policy.retention import Retention
from services.kvstore.policy.traits import ALONE
from services.kvstore.records import ROOT, Identity, RecordId, RecordKind

HOUR = 3600.0


def record(number: int) -> RecordId:
    return RecordId(RecordKind.BLOCK, number.to_bytes(32))


def stored(number: int, stored_at: float = 0.0, retention: RetentionClass = RetentionClass.DEFAULT) -> Stored:
    return Stored(record(number), Identity("rev", "layout"), b"", ROOT, PAGE, (), stored_at, retention)


def filled(capacity: int, segments: int, per_segment: int = 4) -> SegmentIndex:
    """Records 0, 1, 2 ... a second apart, one page each."""
    index = SegmentIndex(capacity * PAGE)
    for number in range(segments * per_segment):
        place = Place(number // per_segment, number % per_segment * PAGE, PAGE)
        index.add(stored(number), place, float(number), ALONE)
    return index


def test_what_is_let_go_of_can_be_read_and_is_wanted_again_once_it_was_used() -> None:
    index = filled(capacity=10, segments=3)
    index.trim(100.0)
    assert len(index) == 12 and index.wanted == 8 * PAGE  # within the share of 10
    assert index.victim(()) == 0 and index.survivors(0, 0.5, 100.0) == []
    index.touch([record(1)], 100.0)
    assert index.survivors(0, 0.5, 100.0) == [(Place(0, PAGE, PAGE), 100.0)]
    assert index.wanted == 9 * PAGE


def test_the_victim_is_the_segment_of_which_least_is_wanted_and_none_that_is_written_to() -> None:
    index = filled(capacity=15, segments=4)
    index.touch([record(0), record(1), record(2)], 50.0)
    index.trim(100.0)
    assert index.victim(()) == 1  # the oldest one holds three that were used
    assert index.victim({1}) == 0 and index.victim({0, 1, 2, 3}) is None
    for number in (12, 13, 14, 15):
        index.forget(record(number), 100.0)
    assert index.is_empty(3) and index.victim(()) in (1, 3)


def test_no_more_than_a_share_of_a_segment_survives_it_and_that_is_what_is_worth_most() -> None:
    index = filled(capacity=1000, segments=1)
    index.touch([record(3), record(1)], 500.0)
    survivors = index.survivors(0, 0.5, 501.0)
    assert [place.offset for place, _ in survivors] == [PAGE, 3 * PAGE]
    for place, _ in survivors:
        index.move(record(place.offset // PAGE), Place(7, place.offset, PAGE))
    assert {one.key[-1] for one in index.remove(0, 501.0)} == {0, 2}
    assert len(index) == 2 and set(index.segments) == {7} and index.wanted == 2 * PAGE


def test_idle_records_leave_at_the_time_of_their_class_wanted_or_not() -> None:
    index = SegmentIndex(5 * PAGE)  # 4 are wanted
    for number in range(6):
        kept = RetentionClass.CHAT if number % 2 else RetentionClass.DEFAULT
        index.restore(stored(number, number * HOUR, kept), Place(0, number * PAGE, PAGE), 6 * HOUR)
    index.trim(6 * HOUR)
    assert index.wanted == 4 * PAGE and len(index) == 6
    assert index.expire(71 * HOUR) == []
    assert index.expire(72 * HOUR) == [record(0)] and index.expire(76 * HOUR) == [record(2), record(4)]
    assert len(index.expire(7 * 24 * HOUR + 5 * HOUR)) == 3 and len(index) == 0 and index.wanted == 0


def test_an_anchor_expires_at_its_own_share_of_the_time_of_its_class() -> None:
    index = SegmentIndex(5 * PAGE, Retention(0.25))
    anchor = RecordId(RecordKind.ANCHOR, record(0).key)
    index.add(stored(0), Place(0, 0, PAGE), 0.0, ALONE)
    index.add(replace(stored(0), id=anchor), Place(0, PAGE, PAGE), 0.0, ALONE)
    assert index.expire(17 * HOUR) == []
    assert index.expire(19 * HOUR) == [anchor] and index.expire(72 * HOUR) == [record(0)]


STEPS = st.lists(st.tuples(st.sampled_from(["add", "touch", "forget", "remove", "expire"]), st.integers(0, 30)))


@given(STEPS)
def test_bytes_wanted_and_used_are_those_of_what_is_here(steps: list[tuple[str, int]]) -> None:
    index, ends, now = SegmentIndex(12 * PAGE), Counter[int](), 0.0
    for step, number in steps:
        now += HOUR
        if step == "add":
            segment = number % 4
            index.add(stored(number), Place(segment, ends[segment], PAGE), now, ALONE)
            ends[segment] += PAGE
        elif step == "touch":
            index.touch([record(number), record(number + 1)], now)
        elif step == "forget":
            index.forget(record(number), now)
        elif step == "expire":
            index.expire(now)
        elif number % 4 in index.segments:
            index.remove(number % 4, now)
            ends[number % 4] = 0
        index.trim(now)
        assert index.used == sum(ends.values())
        wanted = [place for one in index.segments for place, _ in index.survivors(one, 1.0, now)]
        assert index.wanted == PAGE * len(wanted) <= 0.8 * 12 * PAGE
        here = {(index.get(one).place.segment, index.get(one).place.offset) for one in index.ids}
        assert {(place.segment, place.offset) for place in wanted} <= here
