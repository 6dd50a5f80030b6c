"""Every injected bit flip is found; what was sealed arrives byte for byte, whatever its size."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fabric.errors import DataLoss, InvalidArgument
from fabric.kvlink import verify
from fabric.kvlink.verify import Placement, check_placements, copy_verified, digest
from fabric.records import Extent

PIECE, SMALL = verify._PIECE_BYTES, verify._SMALL_BYTES


def landing_with(sizes: list[int], seed: int) -> tuple[np.ndarray, list[Placement]]:
    memory = np.random.default_rng(seed).integers(0, 256, sum(sizes), dtype=np.uint8)
    placements, start = [], 0
    for block, size in enumerate(sizes):
        extent = Extent("latent", block, 1, start, size, digest(memory[start : start + size]))
        placements.append(Placement(extent, np.zeros(size, np.uint8)))
        start += size
    return memory, placements


@pytest.mark.parametrize("size", [1, 15, SMALL, SMALL + 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5])
def test_the_digest_of_pieces_is_the_digest_of_the_whole(size):
    memory, placements = landing_with([size, 7], seed=size)
    copy_verified(memory, placements)
    assert np.array_equal(np.concatenate([each.destination for each in placements]), memory)


def test_a_thousand_of_a_thousand_bit_flips_are_detected():
    rng = random.Random(4)
    sizes = [1, 100, 4096, 65_536, PIECE, PIECE + 1, 300_000]
    memory, placements = landing_with(sizes, seed=4)
    detected = 0
    for _ in range(1000):
        placement = rng.choice(placements)
        at = placement.extent.offset + rng.randrange(placement.extent.size)
        bit = np.uint8(1 << rng.randrange(8))
        memory[at] ^= bit
        with pytest.raises(DataLoss, match=f"group latent block {placement.extent.block} "):
            copy_verified(memory, placements)
        detected += 1
        memory[at] ^= bit
    assert detected == 1000
    copy_verified(memory, placements)  # and all of them were undone


def test_a_digest_is_one_of_the_kind_that_is_named():
    assert verify.DIGEST_KIND == "xxh3-64"
    assert digest(np.frombuffer(b"", np.uint8)) == 0x2D06800538D394C2  # XXH3_64bits of nothing, from its specification


@pytest.mark.parametrize(("offset", "size"), [(-1, 10), (95, 10), (0, 0)])
def test_an_extent_outside_its_landing_is_refused(offset, size):
    placement = Placement(Extent("latent", 3, 1, offset, size, 0), np.zeros(max(size, 0), np.uint8))
    with pytest.raises(InvalidArgument, match="group latent block 3 leaves"):
        check_placements([placement], 100)
