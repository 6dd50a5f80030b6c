"""Layouts of dispatch and combine, permutation and weighted sums on a GPU; definition: kernels/reference/dispatch.py.

Plans are made without atomics, so that equal entries keep their order and repeats their bits. Nothing is allocated or
asked of the host: everything captures into CUDA graphs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dispatch import PLAN_BLOCK, DispatchOps, Plan
from kernels.reference.dispatch import check_combine, check_copy, check_localize, check_plan

_SCANNED = 32  # blocks that the scan takes at a time
_COLUMNS = 1024


def plan(chosen: Tensor, capacity: int, alignment: int, into: Plan) -> None:
    """Fill a plan of chosen int32 [rows, choices] in three launches. Raises KernelError where it does not fit."""
    check_plan(chosen, capacity, alignment, into)
    groups, entries, slots = len(into.counts), chosen.numel(), len(into.sources)
    padded, blocks = triton.next_power_of_2(groups), max(1, triton.cdiv(entries, PLAN_BLOCK))
    share = triton.next_power_of_2(triton.cdiv(slots, blocks))
    _count[(blocks,)](
        chosen, into.blocks, into.sources, entries, slots,
        GROUPS=groups, PADDED=padded, BLOCK=PLAN_BLOCK, SHARE=share, num_warps=8,
    )  # fmt: skip
    _scan[(1,)](
        into.blocks, into.counts, into.offsets, blocks, capacity, alignment,
        GROUPS=groups, PADDED=padded, SCANNED=_SCANNED, num_warps=8,
    )  # fmt: skip
    if entries:
        _place[(blocks,)](
            chosen, into.blocks, into.offsets, into.places, into.sources, entries, groups,
            BLOCK=PLAN_BLOCK, num_warps=8,
        )  # fmt: skip


def destinations(chosen: Tensor, local: int, targets: Tensor) -> None:
    """Fill targets int32 [rows, choices] with ranks, each once a row."""
    rows, choices = chosen.shape
    if rows:
        padded = triton.next_power_of_2(choices)
        _destinations[(triton.cdiv(rows, 32),)](chosen, targets, rows, local, CHOICES=choices, PADDED=padded, ROWS=32)


def copy_rows(x: Tensor, sources: Tensor, choices: int, out: Tensor) -> None:
    """out[slot] = x[sources[slot] // choices]; rows of slots without a source stay as they are. Raises KernelError."""
    check_copy(x, sources, out)
    words, target = _words(x), _words(out)
    width = words.shape[1]
    if len(out) and len(x):
        block = min(_COLUMNS, triton.next_power_of_2(width))
        _copy_rows[(len(out), triton.cdiv(width, block))](
            words, sources, target, width, words.stride(0), target.stride(0), choices, BLOCK=block,
            num_warps=max(1, min(4, block // 128)),
        )  # fmt: skip


def localize(
    chosen: Tensor, weights: Tensor, sources: Tensor, capacity: int, local: int, experts: Tensor, slot_weights: Tensor
) -> None:
    """Fill experts and slot_weights of every slot as the definition says. Raises KernelError."""
    check_localize(chosen, weights, sources, experts, slot_weights)
    choices = chosen.shape[1]
    if len(sources):
        _localize[(triton.cdiv(len(sources), 64),)](
            chosen, weights, sources, experts, slot_weights, len(sources), capacity, local,
            CHOICES=choices, PADDED=triton.next_power_of_2(choices), SLOTS=64,
        )  # fmt: skip


def combine(
    y: Tensor, places: Tensor, weights: Tensor | None, added: Tensor | None, out: Tensor, columns: int = 1024,
    warps: int = 4,
) -> None:  # fmt: skip
    """Fill out bf16 [rows, hidden] with weighted sums of y's rows, in the order of choices. Raises KernelError."""
    check_combine(y, places, weights, added, out)
    (rows, choices), hidden = places.shape, y.shape[1]
    block = min(columns, hidden & -hidden)
    if rows:
        _combine[(rows * (hidden // block),)](
            y, places, places if weights is None else weights, y if added is None else added, out,
            y.stride(0), y.stride(0) if added is None else added.stride(0), out.stride(0),
            HIDDEN=hidden, CHOICES=choices, BLOCK=block, WEIGHTED=weights is not None, ADDED=added is not None,
            num_warps=max(1, min(warps, block // 256)),
        )  # fmt: skip


def _words(rows: Tensor) -> Tensor:
    return rows.view(torch.int32)


@triton.jit
def _count(
    chosen, blocks, sources, entries, slots,
    GROUPS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Entries of a block by group; and a share of the slots becomes empty."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.load(chosen + entry, mask=entry < entries, other=-1)
    lane = tl.arange(0, PADDED)
    found = tl.sum((group[:, None] == lane[None, :]).to(tl.int32), 0)
    tl.store(blocks + tl.program_id(0) * GROUPS + lane, found, mask=lane < GROUPS)
    slot = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    tl.store(sources + slot, tl.full((SHARE,), -1, tl.int32), mask=slot < slots)


@triton.jit
def _scan(
    blocks, counts, offsets, length, capacity, alignment,
    GROUPS: tl.constexpr, PADDED: tl.constexpr, SCANNED: tl.constexpr,
):  # fmt: skip
    """Blocks become what came before each of them; totals and where groups begin."""
    lane = tl.arange(0, PADDED)
    inside = lane < GROUPS
    before = tl.zeros((PADDED,), tl.int32)
    for first in range(0, length, SCANNED):
        block = first + tl.arange(0, SCANNED)[:, None]
        place, there = blocks + block * GROUPS + lane[None, :], (block < length) & inside[None, :]
        found = tl.load(place, mask=there, other=0)
        tl.store(place, before[None, :] + tl.cumsum(found, 0) - found, mask=there)
        before += tl.sum(found, 0)
    tl.store(counts + lane, before, mask=inside)
    size = tl.where(capacity > 0, capacity, (before + alignment - 1) // tl.maximum(alignment, 1) * alignment)
    ends = tl.cumsum(tl.where(inside, size, 0), 0)
    tl.store(offsets + 1 + lane, ends, mask=inside)
    tl.store(offsets, 0)


@triton.jit
def _place(chosen, blocks, offsets, places, sources, entries, groups, BLOCK: tl.constexpr):
    """Slots of a block's entries."""
    first = tl.program_id(0) * BLOCK
    lane = tl.arange(0, BLOCK)
    group = tl.load(chosen + first + lane, mask=first + lane < entries, other=-1)
    others = tl.load(chosen + first + lane, mask=first + lane < entries, other=-1)
    earlier = (others[:, None] == group[None, :]) & (lane[:, None] < lane[None, :])
    rank = tl.sum(earlier.to(tl.int32), 0)
    kept = group >= 0
    slot = tl.load(offsets + group, mask=kept, other=0) + rank
    slot += tl.load(blocks + tl.program_id(0) * groups + group, mask=kept, other=0)
    tl.store(places + first + lane, tl.where(kept, slot, -1), mask=first + lane < entries)
    tl.store(sources + slot, first + lane, mask=kept)


@triton.jit
def _destinations(
    chosen, targets, rows, local, CHOICES: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None, None]
    one, other = tl.arange(0, PADDED)[None, :, None], tl.arange(0, PADDED)[None, None, :]
    mine = tl.load(chosen + row * CHOICES + one, mask=(row < rows) & (one < CHOICES), other=-1)
    theirs = tl.load(chosen + row * CHOICES + other, mask=(row < rows) & (other < CHOICES), other=-1)
    rank, beside = tl.where(mine < 0, -1, mine // local), tl.where(theirs < 0, -2, theirs // local)
    again = tl.max(((rank == beside) & (other < one)).to(tl.int32), 2)
    row2, choice = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED)[None, :]
    inside = (row2 < rows) & (choice < CHOICES)
    target = tl.load(chosen + row2 * CHOICES + choice, mask=inside, other=-1)
    target = tl.where((again > 0) | (target < 0), -1, target // local)
    tl.store(targets + row2 * CHOICES + choice, target, mask=inside)


@triton.jit
def _copy_rows(x, sources, out, width, x_stride, out_stride, choices, BLOCK: tl.constexpr):
    """BLOCK words of a slot's row."""
    slot = tl.program_id(0).to(tl.int64)
    source = tl.load(sources + slot)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if source >= 0:
        row = (source // choices).to(tl.int64)
        tl.store(
            out + slot * out_stride + word, tl.load(x + row * x_stride + word, mask=word < width), mask=word < width
        )


@triton.jit
def _localize(
    chosen, weights, sources, experts, slot_weights, slots, capacity, local,
    CHOICES: tl.constexpr, PADDED: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """SLOTS slots."""
    slot, choice = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS), tl.arange(0, PADDED)[None, :]
    source = tl.load(sources + slot, mask=slot < slots, other=-1)
    inside = (slot < slots)[:, None] & (choice < CHOICES)
    there = inside & (source >= 0)[:, None]
    place = (source // CHOICES)[:, None] * CHOICES + choice
    found = tl.load(chosen + place, mask=there, other=-1)
    number = found - (slot // capacity * local)[:, None]
    here = there & (found >= 0) & (number >= 0) & (number < local)
    tl.store(experts + slot[:, None] * CHOICES + choice, tl.where(here, number, -1), mask=inside)
    weight = tl.load(weights + place, mask=here, other=0.0)
    tl.store(slot_weights + slot[:, None] * CHOICES + choice, weight, mask=inside)


@triton.jit
def _combine(
    y, places, weights, added, out, y_stride, added_stride, out_stride,
    HIDDEN: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a row."""
    parts: tl.constexpr = HIDDEN // BLOCK
    row = (tl.program_id(0) // parts).to(tl.int64)
    column = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        place = tl.load(places + row * CHOICES + choice)
        there = tl.full((BLOCK,), 1, tl.int1) & (place >= 0)
        value = tl.load(y + place.to(tl.int64) * y_stride + column, mask=there, other=0.0).to(tl.float32)
        total += value * tl.load(weights + row * CHOICES + choice) if WEIGHTED else value
    if ADDED:
        total += tl.load(added + row * added_stride + column).to(tl.float32)
    tl.store(out + row * out_stride + column, total.to(tl.bfloat16))


OPS = DispatchOps(plan, destinations, copy_rows, localize, combine)
