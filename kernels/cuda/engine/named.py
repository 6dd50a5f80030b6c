"""Attention over rows that lie anywhere in a cache, by name: places become indices, and partial mixtures one.

A cache is read as it lies: its rows begin at multiples of some step, and an index counts steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda import sparse_prefill as kernel
from kernels.cuda.engine.domain import step_of
from kernels.operands import AttentionSpec, Pages, Ragged, Ring, RopeTable, Selection
from kernels.reference.sparse_prefill import VALUE_WIDTH, NamedLatents
from kernels.staging import staged
from kernels.triton.engine.rows import turned

_LANES = 256


@dataclass(frozen=True, slots=True)
class Mixed:
    """Mixtures bf16 [rows, heads, 512] of one part of the keys, and the logarithm of their weights [rows, heads]."""

    values: Tensor
    weights: Tensor


def attend(query: Tensor, named: NamedLatents, scale: float) -> Mixed:
    """query bf16 [rows, heads, width] over what its lists name."""
    rows, heads, _ = query.shape
    values, weights = query.new_empty(rows, heads, VALUE_WIDTH), query.new_empty(rows, heads, dtype=torch.float32)
    kernel.sparse_prefill(query, named, None, scale, values, weights)
    return Mixed(values, weights)


def in_pages(ragged: Ragged, pages: Pages, selection: Selection | None) -> NamedLatents:
    """Of each row, the chosen entries of its sequence, or all that are finished."""
    step = step_of(pages.storage, pages)
    steps = (pages.storage.stride(0) // step, pages.offset // step, pages.width // step)
    return NamedLatents(_as_places(pages.storage, pages.width, step), *entries_of(ragged, pages, selection, *steps))


def entries_of(
    ragged: Ragged, pages: Pages, selection: Selection | None, page: int, first: int, entry: int
) -> tuple[Tensor, Tensor]:
    """The same as indices int32 [rows, most], -1 behind the last, and counts int32 [rows].

    An index is `page` for every page, `entry` for every entry in it, and `first`.
    """
    on, rows = staged(ragged, pages.storage.device), ragged.rows
    most = on.tables.shape[1] * pages.entries if selection is None else selection.entries.shape[1]
    indices = torch.empty(rows, most, dtype=torch.int32, device=pages.storage.device)
    counts = torch.empty(rows, dtype=torch.int32, device=pages.storage.device)
    chosen = on.positions if selection is None else selection.entries
    _name_entries[(rows, triton.cdiv(most, _LANES))](
        on.positions, on.sequences, on.tables, on.tables.stride(0), chosen,
        on.positions if selection is None else selection.counts, chosen.stride(0), indices, counts, most,
        page, first, entry, ENTRIES=pages.entries, RATE=pages.rate, SELECTED=selection is not None, LANES=_LANES,
        num_warps=4,
    )  # fmt: skip
    return indices, counts


def in_ring(ragged: Ragged, ring: Ring, window: int) -> NamedLatents:
    """Of each row, those of its last `window` positions that were there before this batch."""
    on, step = staged(ragged, ring.storage.device), step_of(ring.storage, ring)
    indices = torch.empty(ragged.rows, window, dtype=torch.int32, device=ring.storage.device)
    _name_window[(ragged.rows,)](
        on.positions, on.sequences, on.starts, on.context, on.slots, on.floors, indices, ring.storage.stride(0) // step,
        ring.offset // step, ring.width // step, WINDOW=window, CAPACITY=ring.capacity, FRESH=False,
        LANES=triton.next_power_of_2(window), num_warps=1,
    )  # fmt: skip
    return NamedLatents(_as_places(ring.storage, ring.width, step), indices)


def in_batch(ragged: Ragged, fresh: Tensor, window: int) -> NamedLatents:
    """Of each row, those of its last `window` positions that are rows of this batch, whose keys are `fresh`."""
    on = staged(ragged, fresh.device)
    indices = torch.empty(ragged.rows, window, dtype=torch.int32, device=fresh.device)
    _name_window[(ragged.rows,)](
        on.positions, on.sequences, on.starts, on.context, on.slots, on.floors, indices, 0, 0, 1, WINDOW=window,
        CAPACITY=1, FRESH=True, LANES=triton.next_power_of_2(window), num_warps=1,
    )  # fmt: skip
    return NamedLatents(fresh, indices)


def joined(parts: Sequence[Mixed], spec: AttentionSpec, ragged: Ragged, rope: RopeTable) -> Tensor:
    """One mixture of up to three parts, the sink in the denominator alone, turned back: fp32 [rows, heads * width]."""
    rows, heads, width = parts[0].values.shape
    out = torch.empty(rows, heads * width, dtype=torch.float32, device=parts[0].values.device)
    first, second, third = (*parts, parts[0], parts[0])[:3]
    _join[(rows, heads)](
        first.values, first.weights, second.values, second.weights, third.values, third.weights, spec.sink,
        staged(ragged, out.device).positions, rope.cos, rope.sin, out, PARTS=len(parts), HEADS=heads, WIDTH=width,
        PAIRS=rope.cos.shape[1], WIDE=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return out


def _as_places(storage: Tensor, width: int, step: int) -> Tensor:
    """Every place of the storage at which a row may begin, [places, width]: they overlap."""
    last = (len(storage) - 1) * storage.stride(0) + storage.shape[1] - width
    return storage.as_strided((last // step + 1, width), (step, 1))


@triton.jit
def _name_entries(
    positions, sequences, tables, table_stride, chosen, counts, chosen_stride, indices, found, most, page_steps,
    first_step, entry_steps, ENTRIES: tl.constexpr, RATE: tl.constexpr, SELECTED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * LANES + tl.arange(0, LANES)
    at = tl.load(positions + row)
    count = tl.where(at >= 0, (at + 1) // RATE, 0)
    if SELECTED:
        count = tl.where(at >= 0, tl.load(counts + row), 0)
    count = tl.minimum(count, most)
    entry, inside = lane, lane < count
    if SELECTED:
        entry = tl.load(chosen + row * chosen_stride + lane, mask=inside, other=0)
    table = tables + tl.maximum(tl.load(sequences + row), 0).to(tl.int64) * table_stride
    page = tl.load(table + entry // ENTRIES, mask=inside, other=0)
    place = page * page_steps + first_step + (entry % ENTRIES) * entry_steps
    tl.store(indices + row * most + lane, tl.where(inside, place, -1), mask=lane < most)
    if tl.program_id(1) == 0:
        tl.store(found + row, count)


@triton.jit
def _name_window(
    positions, sequences, starts, contexts, slots, floors, indices, slot_steps, first_step, row_steps,
    WINDOW: tl.constexpr, CAPACITY: tl.constexpr, FRESH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    at = tl.load(positions + row)
    sequence = tl.maximum(tl.load(sequences + row), 0)
    context = tl.load(contexts + sequence)
    position = tl.maximum(tl.load(floors + sequence), at - WINDOW + 1) + lane
    inside = (at >= 0) & (position <= at)
    if FRESH:
        inside &= position >= context
        place = tl.load(starts + sequence) + position - context
    else:
        inside &= position < context
        slot = tl.maximum(tl.load(slots + sequence), 0)
        place = slot * slot_steps + first_step + (position % CAPACITY) * row_steps
    tl.store(indices + row * WINDOW + lane, tl.where(inside, place, -1), mask=lane < WINDOW)


@triton.jit
def _base2(weights, place):
    """A logarithm to base 2 of a part's weight: a part of no key says +inf."""
    weight = tl.load(weights + place)
    return tl.where(weight == float("inf"), -float("inf"), weight * 1.4426950408889634)


@triton.jit
def _join(
    first, first_weight, second, second_weight, third, third_weight, sink, positions, cosine, sine, out,
    PARTS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, head, channel = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDE)
    place, inside = row * HEADS + head, channel < WIDTH
    still = tl.load(sink + head) * 1.4426950408889634
    one = _base2(first_weight, place)
    peak = tl.maximum(one, still)
    if PARTS > 1:
        two = _base2(second_weight, place)
        peak = tl.maximum(peak, two)
    if PARTS > 2:
        three = _base2(third_weight, place)
        peak = tl.maximum(peak, three)
    share = tl.exp2(one - peak)
    total = share + tl.exp2(still - peak)
    result = share * tl.load(first + place * WIDTH + channel, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 1:
        share = tl.exp2(two - peak)
        total += share
        result += share * tl.load(second + place * WIDTH + channel, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 2:
        share = tl.exp2(three - peak)
        total += share
        result += share * tl.load(third + place * WIDTH + channel, mask=inside, other=0.0).to(tl.float32)
    at = tl.maximum(tl.load(positions + row), 0).to(tl.int64)
    result = turned(result / total, at, cosine, sine, channel, -1.0, WIDTH, PAIRS, WIDE)
    tl.store(out + row * HEADS * WIDTH + head * WIDTH + channel, result, mask=inside)
