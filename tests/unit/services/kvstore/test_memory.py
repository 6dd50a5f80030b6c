"""Slab memory keeps ranges apart and loses none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.memory import ALIGNMENT, SlabAllocator

CAPACITY = 64 * ALIGNMENT


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20 * ALIGNMENT))))
def test_ranges_never_overlap_and_all_come_back(actions: list[tuple[bool, int]]) -> None:
    slab = SlabAllocator(CAPACITY)
    taken: dict[int, int] = {}
    for take, number in actions:
        if take:
            offset = slab.take(number)
            if offset is not None:
                end = offset + number
                assert end <= CAPACITY
                assert all(end <= start or offset >= start + size for start, size in taken.items())
                taken[offset] = number
        elif taken:
            offset = sorted(taken)[number % len(taken)]
            del taken[offset]
            slab.give(offset)
    for offset in taken:
        slab.give(offset)
    assert slab.used == 0
    assert slab.take(CAPACITY) == 0  # neighbours were joined: the whole slab is one range again


def test_a_range_is_given_back_only_once() -> None:
    slab = SlabAllocator(CAPACITY)
    offset = slab.take(1)
    assert offset is not None
    slab.give(offset)
    with pytest.raises(KeyError):
        slab.give(offset)


def test_no_range_is_larger_than_the_slab() -> None:
    assert SlabAllocator(CAPACITY).take(CAPACITY + 1) is None
