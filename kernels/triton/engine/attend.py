"""Attention over a window and compressed entries on a GPU: keys that serve as values, shared by all heads, and a sink.

Each row's keys are one list, its window first; programs share it, and what they found is joined and turned back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operands import AttentionSpec, Pages, Ragged, Ring, RopeTable, Selection
from kernels.staging import staged
from kernels.triton.engine.latent import splits_of
from kernels.triton.engine.rows import turned

_HEADS = 16  # that one program takes


def attend(
    queries: Tensor, fresh: Tensor, spec: AttentionSpec, ragged: Ragged, ring: Ring, pages: Pages | None,
    selection: Selection | None, rope: RopeTable, parts: int = 0,
) -> Tensor:  # fmt: skip
    """As reference.attend.attend. `parts`: programs that share a row's keys; 0: as many as keep a GPU busy."""
    rows, on, pairs = len(queries), staged(ragged, queries.device), rope.cos.shape[1]
    wide = max(16, triton.next_power_of_2(spec.width))
    turned_queries, out = turn_queries(queries, spec, ragged, rope), queries.new_empty(rows, spec.heads * spec.width)
    given = ring if pages is None else pages
    chosen = on.positions if selection is None else selection.entries
    entries = 0 if pages is None else on.tables.shape[1] * pages.entries
    if selection is not None:
        entries = min(entries, selection.entries.shape[1])
    parts = parts or splits_of(rows, spec.heads, spec.window + entries)
    mixed, weights = queries.new_empty(rows, spec.heads, parts, spec.width), queries.new_empty(rows, spec.heads, parts)
    narrow = ring.storage.dtype == torch.bfloat16
    _attend[(rows, parts, triton.cdiv(spec.heads, _HEADS))](
        turned_queries, fresh, on.positions, on.sequences, on.starts, on.context, on.slots, on.floors, on.tables,
        on.tables.stride(0), ring.storage, ring.storage.stride(0), ring.offset, given.storage, given.storage.stride(0),
        given.offset, chosen, on.positions if selection is None else selection.counts, chosen.stride(0), mixed,
        weights, spec.width**-0.5 * 1.4426950408889634, HEADS=spec.heads, WIDTH=spec.width, WINDOW=spec.window,
        CAPACITY=ring.capacity, ENTRIES=pages.entries if pages else 1, RATE=pages.rate if pages else 1, BLOCK=_HEADS,
        KEYS=32 if narrow else 16, WIDE=wide, PAGED=pages is not None, SELECTED=selection is not None,
        num_warps=8, num_stages=1,
    )  # fmt: skip
    _finish[(rows, spec.heads)](
        mixed, weights, spec.sink, on.positions, rope.cos, rope.sin, out, PARTS=parts,
        LANES=triton.next_power_of_2(parts), HEADS=spec.heads, WIDTH=spec.width, PAIRS=pairs, WIDE=wide, num_warps=4,
    )  # fmt: skip
    return out


def turn_queries(
    queries: Tensor, spec: AttentionSpec, ragged: Ragged, rope: RopeTable, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Each head's query, normed where the model does so, and turned: `dtype` [rows, heads, width]."""
    out = torch.empty(len(queries), spec.heads, spec.width, dtype=dtype, device=queries.device)
    _heads[(len(queries), spec.heads)](
        queries, queries.stride(0), staged(ragged, queries.device).positions, rope.cos, rope.sin, out,
        spec.norm_eps or 0.0, NORM=spec.norm_eps is not None, HEADS=spec.heads, WIDTH=spec.width,
        PAIRS=rope.cos.shape[1], WIDE=max(16, triton.next_power_of_2(spec.width)), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _heads(
    queries, stride, positions, cosine, sine, out, eps, NORM: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One head's query, normed where the model does so, and turned."""
    row, head, channel = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDE)
    value = tl.load(queries + row * stride + head * WIDTH + channel, mask=channel < WIDTH, other=0.0)
    if NORM:
        value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    at = tl.maximum(tl.load(positions + row), 0).to(tl.int64)
    value = turned(value, at, cosine, sine, channel, 1.0, WIDTH, PAIRS, WIDE)
    tl.store(out + (row * HEADS + head) * WIDTH + channel, value.to(out.dtype.element_ty), mask=channel < WIDTH)


@triton.jit
def _attend(
    query, fresh, positions, sequences, starts, contexts, slots, floors, tables, table_stride, ring, slot_stride,
    ring_offset, storage, page_stride, offset, chosen, counts, chosen_stride, mixed, weights, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, CAPACITY: tl.constexpr, ENTRIES: tl.constexpr,
    RATE: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr, PAGED: tl.constexpr,
    SELECTED: tl.constexpr,
):  # fmt: skip
    """BLOCK heads of one row over one part of its keys."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    head, channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDE)
    at = tl.load(positions + row)
    sequence = tl.maximum(tl.load(sequences + row), 0).to(tl.int64)
    start, context = tl.load(starts + sequence).to(tl.int64), tl.load(contexts + sequence)
    slot_rows = ring + tl.maximum(tl.load(slots + sequence), 0).to(tl.int64) * slot_stride + ring_offset
    oldest = tl.maximum(tl.load(floors + sequence), at - WINDOW + 1)
    near = tl.where(at >= 0, at + 1 - oldest, 0)
    count = near
    if PAGED:
        far = (at + 1) // RATE
        if SELECTED:
            far = tl.load(counts + row)
        count += tl.where(at >= 0, far, 0)
    present = (head < HEADS)[:, None] & (channel < WIDTH)[None, :]
    asked = tl.load(query + (row * HEADS + head)[:, None] * WIDTH + channel[None, :], mask=present, other=0.0)
    asked = asked.to(ring.dtype.element_ty)
    most = tl.full((BLOCK,), -float("inf"), tl.float32)
    total, sums = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK, WIDE), tl.float32)
    each = tl.cdiv(tl.cdiv(count, KEYS), parts) * KEYS
    end = tl.minimum((part + 1) * each, count)
    for first in range(part * each, end, KEYS):
        number = first + tl.arange(0, KEYS)
        inside, position = number < end, oldest + number
        is_near = inside & (number < near)
        is_new = is_near & (position >= context)
        wide = (channel < WIDTH)[None, :]
        places = slot_rows + (position % CAPACITY) * WIDTH
        keys = tl.load(
            places[:, None] + channel[None, :], mask=(is_near & (position < context))[:, None] & wide, other=0.0
        )
        places = fresh + (start + position - context) * WIDTH
        keys += tl.load(places[:, None] + channel[None, :], mask=is_new[:, None] & wide, other=0.0)
        if PAGED:
            is_far, entry = inside & (number >= near), number - near
            if SELECTED:
                entry = tl.load(chosen + row * chosen_stride + entry, mask=is_far, other=0)
            page = tl.load(tables + sequence * table_stride + entry // ENTRIES, mask=is_far, other=0).to(tl.int64)
            places = storage + page * page_stride + offset + (entry % ENTRIES) * WIDTH
            keys += tl.load(places[:, None] + channel[None, :], mask=is_far[:, None] & wide, other=0.0)
        scores = tl.dot(asked, tl.trans(keys), input_precision="tf32x3") * scale
        scores = tl.where(inside[None, :], scores, -float("inf"))
        peak = tl.maximum(most, tl.max(scores, 1))
        shrink, weight = tl.exp2(most - peak), tl.exp2(scores - peak[:, None])
        total = total * shrink + tl.sum(weight, 1)
        sums = tl.dot(weight.to(keys.dtype), keys, sums * shrink[:, None], input_precision="tf32x3")
        most = peak
    found = total > 0
    sums /= tl.where(found, total, 1.0)[:, None]
    place = (row * HEADS + head) * parts + part
    tl.store(mixed + place[:, None] * WIDTH + channel[None, :], sums, mask=present)
    tl.store(weights + place, tl.where(found, most + tl.log2(total), -float("inf")), mask=head < HEADS)


@triton.jit
def _finish(
    mixed, weights, sink, positions, cosine, sine, out, PARTS: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One head's parts joined, its sink in the denominator alone, and turned back."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane, channel = tl.arange(0, LANES), tl.arange(0, WIDE)
    place = (row * HEADS + head) * PARTS
    weight = tl.load(weights + place + lane, mask=lane < PARTS, other=-float("inf"))
    still = tl.load(sink + head) * 1.4426950408889634
    peak = tl.maximum(tl.max(weight, 0), still)
    share = tl.exp2(weight - peak)
    share /= tl.sum(share, 0) + tl.exp2(still - peak)
    result = tl.zeros((WIDE,), tl.float32)
    for part in range(PARTS):
        value = tl.load(mixed + (place + part) * WIDTH + channel, mask=channel < WIDTH, other=0.0)
        result += value * tl.sum(tl.where(lane == part, share, 0.0), 0)
    at = tl.maximum(tl.load(positions + row), 0).to(tl.int64)
    result = turned(result, at, cosine, sine, channel, -1.0, WIDTH, PAIRS, WIDE)
    tl.store(out + (row * HEADS + head) * WIDTH + channel, result, mask=channel < WIDTH)
