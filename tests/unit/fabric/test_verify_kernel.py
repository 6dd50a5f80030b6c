"""The compiled copy stores what it hashes and nothing else, and its digests are those of xxhash."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.errors import DataLoss
from fabric.kvlink import verify
from fabric.kvlink.inproc import InprocLink
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.verify import CopyRow, Placement, copy_rows, digest
from fabric.records import Extent
from kernels.host.sealed_copy import LEAST_BYTES, copy_sealed

SOURCE = np.random.default_rng(5).integers(0, 256, 1 << 16, dtype=np.uint8)
GUARD = 64


def row(offset: int, size: int, shift: int = 0) -> tuple[CopyRow, np.ndarray]:
    """A row of so many bytes, and its destination with guards before and after it."""
    room = np.full(size + shift + 2 * GUARD, 0xEE, np.uint8)
    return (offset, size, digest(SOURCE[offset : offset + size]), room[GUARD + shift :][:size]), room


def test_what_is_too_short_for_the_kernel_is_known_on_both_sides():
    assert verify.KERNEL_BYTES == LEAST_BYTES


@settings(max_examples=400, deadline=None)
@given(size=st.integers(LEAST_BYTES, 9000), offset=st.integers(0, 4000), shift=st.integers(0, 63))
def test_any_extent_at_any_address_is_copied_and_has_the_digest_of_xxhash(size, offset, shift):
    (_, _, seal, target), room = row(offset, size, shift)
    found = copy_sealed(SOURCE.ctypes.data, np.array([[offset, size, seal, target.ctypes.data]], np.uint64))
    assert found == -1
    assert xxhash.xxh3_64_intdigest(target.data) == seal
    assert np.array_equal(target, SOURCE[offset : offset + size])
    assert set(room[: GUARD + shift]) == set(room[GUARD + shift + size :]) == {0xEE}


@settings(max_examples=200, deadline=None)
@given(size=st.integers(LEAST_BYTES, 5000), at=st.integers(0, 4999), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(size, at, bit):
    landing = SOURCE[:size].copy()
    landing[at % size] ^= 1 << bit
    whole, _ = row(0, size)
    assert copy_rows(landing, [whole], copy_sealed) == 0


@pytest.mark.parametrize("wrong", range(6))
def test_the_row_that_differs_is_named_whoever_copied_it(wrong):
    """Rows of the kernel, rows too short for it and scattered ones."""
    rows = [row(0, 10)[0], row(10, 5000)[0], row(6000, 240)[0], row(7000, 241)[0], row(8000, 1024)[0]]
    parts = np.zeros(700, np.uint8)
    rows.append((9000, 700, digest(SOURCE[9000:9700]), (parts[:300], parts[300:])))
    assert copy_rows(SOURCE, rows, copy_sealed) is None
    assert all(np.array_equal(to, SOURCE[at : at + size]) for at, size, _, to in rows[:5])
    assert np.array_equal(parts, SOURCE[9000:9700])
    at, size, seal, to = rows[wrong]
    rows[wrong] = (at, size, seal ^ 1, to)
    assert copy_rows(SOURCE, rows, copy_sealed) == wrong


async def test_a_pool_with_a_kernel_refuses_what_differs():
    link = InprocLink("here", 1)
    pool = LandingPool(link, 1 << 20, kernel=copy_sealed)
    try:
        pool.grant("ticket", 1 << 16)
        pool._memory[: 1 << 16] = SOURCE
        good = Extent("latent", 0, 1, 0, 4096, digest(SOURCE[:4096]))
        bad = Extent("latent", 7, 1, 4096, 4096, digest(SOURCE[:4096]))
        target = np.zeros((2, 4096), np.uint8)
        await pool.commit("ticket", [Placement(good, target[0])])
        assert np.array_equal(target[0], SOURCE[:4096])
        with pytest.raises(DataLoss, match="block 7"):
            await pool.commit("ticket", [Placement(bad, target[1])])
    finally:
        await link.close()
