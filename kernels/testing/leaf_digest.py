"""Checks of the leaf-digest kernels against their definition, on any device that runs them. Knows no clock.

`TRITON_INTERPRET=1 python -m kernels.testing.leaf_digest` runs them without a GPU, in triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.reference.leaf_digest import LEAF_BYTES, leaf_digest

# V4.1's extents of one block, and what lies around the edges of words, leaves and of the lanes that combine leaves.
SIZES = (55_296, 13_056, 36_864, 8_704, 8, 16, LEAF_BYTES - 8, LEAF_BYTES, LEAF_BYTES + 8, 257 * LEAF_BYTES + 16)
# Few leaves: the interpreter takes a millisecond for each.
INTERPRETED = (8, 16, LEAF_BYTES - 8, LEAF_BYTES + 8, 8_704)


def patterns(nbytes: int, seed: int) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Bytes that differ everywhere, and bytes in which a kernel that mixes up places would find nothing to see."""
    yield "random", np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    yield "zeros", np.zeros(nbytes, np.uint8)
    yield "ones", np.full(nbytes, 0xFF, np.uint8)
    yield "top bits", np.tile(np.array([0, 0, 0, 0, 0, 0, 0, 0x80], np.uint8), nbytes // 8)
    yield "one leaf repeated", np.resize(np.arange(LEAF_BYTES, dtype=np.uint32).astype(np.uint8), nbytes)


def check_kernels(device: torch.device, sizes: tuple[int, ...] = SIZES) -> None:
    """AssertionError where a digest or a copied byte differs, or a byte outside the extents was written."""
    for gap in (8, 16):
        extents = np.array([size for size in sizes if gap == 8 or size % 16 == 0], np.int64)
        sources = gap + np.concatenate(([0], np.cumsum(extents + gap)[:-1]))
        destinations = sources[-1] + extents[-1] - sources - extents + gap  # the other way round
        nbytes = int(sources[-1] + extents[-1] + gap)
        for name, content in patterns(nbytes, gap):
            _check(device, content, sources, destinations, extents, f"{name}, starts at multiples of {gap}")


def _check(
    device: torch.device,
    content: NDArray[np.uint8],
    sources: NDArray[np.int64],
    destinations: NDArray[np.int64],
    sizes: NDArray[np.int64],
    case: str,
) -> None:
    from kernels.triton.leaf_digest import copy_digest_extents, digest_extents, plan_extents

    wanted = [leaf_digest(content[start : start + size]) for start, size in zip(sources, sizes, strict=True)]
    expected = np.full(content.size, 0xA5, np.uint8)
    for start, target, size in zip(sources, destinations, sizes, strict=True):
        expected[target : target + size] = content[start : start + size]
    source = torch.from_numpy(content).to(device)
    plan = plan_extents(sources, destinations, sizes, content.size, content.size, device)
    _hold(unsigned(digest_extents(source, plan)).tolist() == wanted, f"digest of {case}")
    written = torch.full_like(source, 0xA5)
    _hold(unsigned(copy_digest_extents(source, written, plan)).tolist() == wanted, f"digest of a copy of {case}")
    _hold(np.array_equal(written.cpu().numpy(), expected), f"copy of {case}")


def _hold(holds: bool, case: str) -> None:
    if not holds:
        raise AssertionError(f"the kernels differ from their definition: {case}")


def check_random_flips(device: torch.device, flips: int, seed: int = 0) -> int:
    """How many of so many single flipped bits change the digest of their extent, and of no other, as it is copied."""
    from kernels.triton.leaf_digest import copy_digest_extents, plan_extents

    rng = np.random.default_rng(seed)
    sizes = np.array(SIZES * 8, np.int64)
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    nbytes = int(sizes.sum())
    slab = torch.from_numpy(rng.integers(0, 256, nbytes, dtype=np.uint8)).to(device)
    plan = plan_extents(starts, starts, sizes, nbytes, nbytes, device)
    blocks = torch.empty_like(slab)
    clean, found = unsigned(copy_digest_extents(slab, blocks, plan)), 0
    for place, bit in zip(rng.integers(0, nbytes, flips).tolist(), rng.integers(0, 8, flips).tolist(), strict=True):
        slab[place] ^= 1 << bit
        differs = np.flatnonzero(unsigned(copy_digest_extents(slab, blocks, plan)) != clean)
        found += differs.tolist() == [np.searchsorted(starts, place, side="right") - 1]
        slab[place] ^= 1 << bit
    return found


def check_late_writer(device: torch.device, rounds: int) -> int:
    """Copies out of a slab that another stream overwrites meanwhile. Returns in how many rounds that was seen.

    AssertionError where a digest is not that of the bytes that lie in the destination: then a writer could spoil a
    block behind a digest that matches.
    """
    from kernels.triton.leaf_digest import copy_digest_extents, digest_extents, plan_extents

    sizes = np.full(2_048, 8 * LEAF_BYTES, np.int64)
    starts = np.arange(len(sizes)) * sizes
    nbytes, writing, seen = int(sizes.sum()), torch.cuda.Stream(device), 0
    slab = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    blocks, plan = torch.empty_like(slab), plan_extents(starts, starts, sizes, nbytes, nbytes, device)
    for number in range(rounds):
        torch.cuda.synchronize(device)
        with torch.cuda.stream(writing):
            for fill in range(16):
                slab.fill_(fill + number % 64)
        digests = unsigned(copy_digest_extents(slab, blocks, plan))
        torch.cuda.synchronize(device)
        _hold(np.array_equal(unsigned(digest_extents(blocks, plan)), digests), f"late writer, round {number}")
        seen += len(set(digests.tolist())) > 1
    return seen


def unsigned(digests: torch.Tensor) -> NDArray[np.uint64]:
    """Digests as the kernels return them (int64) on the host, uint64."""
    return digests.cpu().numpy().view(np.uint64)


if __name__ == "__main__":
    from kernels.testing.interpreter import require_interpreter

    require_interpreter()
    check_kernels(torch.device("cpu"), INTERPRETED)
    print("the kernels equal the reference")
