"""Descriptor arithmetic moves the same bytes with fewer copies, and lets nothing out of its region."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.errors import InvalidArgument
from fabric.kvlink import plan
from fabric.kvlink.link import Region, Token, Write
from fabric.records import Landing, LinkAddress

BYTES = 4096


def region() -> Region:
    memory = np.random.default_rng(0).integers(0, 256, BYTES, dtype=np.uint8)
    return Region(Token(0, 0, BYTES), memory)


def write(source: list[int], target: list[int], sizes: list[int]) -> Write:
    arrays = (np.array(values, np.int64) for values in (source, target, sizes))
    first, second, third = arrays
    return Write(region(), first, Token(1, 0, BYTES).pack(), second, third)


def moved(memory: np.ndarray, table: np.ndarray) -> np.ndarray:
    out = np.zeros(BYTES, np.int64) - 1
    for source, target, size in table.T:
        out[target : target + size] = memory[source : source + size]
    return out


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(0, 2)), max_size=100), st.sampled_from([0, 64])
)
def test_coalescing_moves_the_same_bytes_and_leaves_no_adjacent_pair(steps, few):
    source, target, sizes, at, to = [], [], [], 0, 0
    for size, source_gap, target_gap in steps:
        at, to = at + source_gap, to + target_gap
        source.append(at)
        target.append(to)
        sizes.append(size)
        at, to = at + size, to + size
    original = write(source, target, sizes)
    with patch.object(plan, "_FEW", few):
        small = plan.copies(original).table
    memory = original.source.memory
    assert np.array_equal(moved(memory, np.array([source, target, sizes], np.int64)), moved(memory, small))
    assert small.shape[1] <= max(1, len(sizes))
    ends = small[:2] + small[2]
    assert (ends[:, :-1] != small[:2, 1:]).any(axis=0).all()


def test_a_contiguous_push_is_one_descriptor():
    sizes = np.full(64, 16, np.int64)
    offsets = plan.lay_out(sizes)
    whole = plan.copies(Write(region(), offsets, Token(1, 0, BYTES).pack(), offsets + 100, sizes))
    assert whole.table.tolist() == [[0], [100], [1024]]


def test_layout_is_dense():
    assert plan.lay_out(np.array([3, 5, 7])).tolist() == [0, 3, 8]
    assert plan.lay_out(np.zeros(0, np.int64)).tolist() == []


@pytest.mark.parametrize(
    ("source", "target", "sizes", "field"),
    [
        ([BYTES], [0], [1], "source_offsets"),
        ([-1], [0], [1], "source_offsets"),
        ([0], [BYTES - 1], [2], "target_offsets"),
        ([0], [0], [-1], "source_offsets"),
        ([0], [2**63 - 1], [10], "target_offsets"),
        ([0], [0], [2**62], "source_offsets"),
        ([0, 1], [0], [1], "sizes"),
    ],
)
def test_a_copy_outside_a_region_is_refused(source, target, sizes, field):
    with pytest.raises(InvalidArgument) as caught:
        plan.copies(write(source, target, sizes))
    assert caught.value.field == field
    with pytest.raises(InvalidArgument, match=r"region|shape"), patch.object(plan, "_FEW", 0):
        plan.copies(write(source, target, sizes))


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_arbitrary_tokens_are_refused_or_read(packed):
    try:
        assert Token.unpack(packed).pack() == packed
    except InvalidArgument as error:
        assert error.field == "region"


def test_a_write_stays_inside_its_landing():
    landing = Landing("t", LinkAddress("tcp://h:1", "p", 1), Token(1, 0, BYTES).pack(), 1000, 100)
    one = np.array([0], np.int64)
    assert plan.write_to(landing, region(), one, one, np.array([100])).target_offsets.tolist() == [1000]
    for offset, size in ((0, 101), (1, 100), (-1, 5)):
        with pytest.raises(InvalidArgument):
            plan.write_to(landing, region(), one, np.array([offset]), np.array([size]))
