"""Leaf-tree digests on a GPU, alone or while extents are copied; bit for bit kernels/reference/leaf_digest.py.

One program takes one leaf: it reads the leaf once, writes what it read to its new place if there is one, and hashes
the same registers. Reads are volatile, so that no compiler may read again what a late writer could change in between.
A second kernel combines the leaves of every extent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from kernels.reference import leaf_digest as definition

LEAF_WORDS = tl.constexpr(definition.LEAF_WORDS)
_WORD_KEY = tl.constexpr(definition.WORD_KEY)
_LEAF_KEY = tl.constexpr(definition.LEAF_KEY)
_LENGTH_KEY = tl.constexpr(definition.LENGTH_KEY)
_MIX_FIRST = tl.constexpr(definition.MIX_FIRST)
_MIX_SECOND = tl.constexpr(definition.MIX_SECOND)
# Leaves of an extent that are combined at a time.
_ROOT_LANES = 256
_MAX_LEAVES = 65_535  # the second axis of a CUDA grid


@dataclass(frozen=True, slots=True, eq=False)
class ExtentPlan:
    """Checked extents on their device. `table` int64 [n, 3]: first word in the source, in the destination, words.

    `aligned`: every start and size is a multiple of 16 bytes, so that a thread moves 16 at a time.
    """

    table: Tensor
    leaves: int
    aligned: bool

    @property
    def count(self) -> int:
        return self.table.shape[0]


def plan_extents(
    sources: NDArray[np.int64],
    destinations: NDArray[np.int64],
    sizes: NDArray[np.int64],
    source_bytes: int,
    destination_bytes: int,
    device: torch.device,
) -> ExtentPlan:
    """Places of extents, int64 [n] bytes each, checked against both memories and sent to the device.

    Raises ValueError: a start or size is no multiple of 8 bytes, an extent is empty, leaves its memory or has more
    than 256 MiB. Extents that share a destination are the caller's mistake and are not looked for.
    """
    rows = np.stack((sources, destinations, sizes), axis=1).astype(np.int64)
    if rows.size == 0 or (rows % 8).any():
        raise ValueError("extents on a GPU start and end at multiples of 8 bytes, and there is at least one")
    if (rows < 0).any() or (sizes <= 0).any() or sizes.max() > _MAX_LEAVES * definition.LEAF_BYTES:
        raise ValueError("an extent is empty, starts before its memory or has more than 256 MiB")
    if (sources > source_bytes - sizes).any() or (destinations > destination_bytes - sizes).any():
        raise ValueError(f"an extent leaves its source of {source_bytes} or destination of {destination_bytes} bytes")
    table = torch.from_numpy(rows // 8).to(device)
    return ExtentPlan(table, int(-(-sizes.max() // definition.LEAF_BYTES)), not (rows % 16).any())


def digest_extents(memory: Tensor, plan: ExtentPlan) -> Tensor:
    """Digests of extents of `memory` (uint8 [bytes]) at the plan's sources, int64 [n] with the bits of the uint64."""
    return _run(memory, memory, plan, copy=False)


def copy_digest_extents(source: Tensor, destination: Tensor, plan: ExtentPlan) -> Tensor:
    """Copies every extent from `source` to `destination` (uint8 [bytes], of one device, not overlapping).

    Returns the digests of what was written, int64 [n] with the bits of the uint64, in the stream's order.
    """
    return _run(source, destination, plan, copy=True)


def _run(source: Tensor, destination: Tensor, plan: ExtentPlan, copy: bool) -> Tensor:
    leaves = torch.empty(plan.count, plan.leaves, dtype=torch.int64, device=source.device)
    digests = torch.empty(plan.count, dtype=torch.int64, device=source.device)
    words = source.view(torch.int64), destination.view(torch.int64)
    _hash_leaves[(plan.count, plan.leaves)](
        *words, plan.table, leaves, plan.leaves, COPY=copy, UNIT=2 if plan.aligned else 1, num_warps=4
    )
    turns = triton.cdiv(plan.leaves, _ROOT_LANES)
    _combine_leaves[(plan.count,)](
        leaves, plan.table, digests, plan.leaves, TURNS=turns, LANES=_ROOT_LANES, num_warps=1
    )
    return digests


@triton.jit
def _mix(word):
    word = (word ^ (word >> 33)) * _MIX_FIRST
    word = (word ^ (word >> 33)) * _MIX_SECOND
    return word ^ (word >> 33)


@triton.jit
def _hash_leaves(source, destination, table, hashes, stride, COPY: tl.constexpr, UNIT: tl.constexpr):
    """L(i) of leaf program_id(1) of extent program_id(0), if it has one."""
    extent, leaf = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    words = tl.multiple_of(tl.load(table + 3 * extent + 2), UNIT) - leaf * LEAF_WORDS
    if words > 0:
        words = tl.minimum(words, LEAF_WORDS)
        start = tl.multiple_of(tl.load(table + 3 * extent), UNIT) + leaf * LEAF_WORDS
        lane = tl.arange(0, LEAF_WORDS)
        inside = lane < words
        read = tl.load(source + start + lane, mask=inside, other=0, volatile=True)
        if COPY:
            target = tl.multiple_of(tl.load(table + 3 * extent + 1), UNIT) + leaf * LEAF_WORDS
            tl.store(destination + target + lane, read, mask=inside)
        key = (lane + 1).to(tl.uint64) * _WORD_KEY
        terms = tl.where(inside, _mix(read.to(tl.uint64, bitcast=True) ^ key), 0)
        value = _mix(tl.sum(terms, axis=0) + (words * 8).to(tl.uint64) * _LENGTH_KEY)
        tl.store(hashes + extent * stride + leaf, value.to(tl.int64, bitcast=True))


@triton.jit
def _combine_leaves(hashes, table, digests, stride, TURNS: tl.constexpr, LANES: tl.constexpr):
    """The digest of extent program_id(0) from its leaves, LANES at a time. TURNS is 1 up to extents of 1 MiB."""
    extent = tl.program_id(0).to(tl.int64)
    words = tl.load(table + 3 * extent + 2)
    leaves = (words + LEAF_WORDS - 1) // LEAF_WORDS
    total = tl.zeros((LANES,), tl.uint64)
    for turn in range(TURNS):
        leaf = turn * LANES + tl.arange(0, LANES)
        inside = leaf < leaves
        value = tl.load(hashes + extent * stride + leaf, mask=inside, other=0).to(tl.uint64, bitcast=True)
        total += tl.where(inside, _mix(value ^ ((leaf + 1).to(tl.uint64) * _LEAF_KEY)), 0)
    root = _mix(tl.sum(total, axis=0) + (words * 8).to(tl.uint64) * _LENGTH_KEY)
    tl.store(digests + extent, root.to(tl.int64, bitcast=True))
