"""Compressor pooling on a GPU: one program for each window that the batch completes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.csa2 import PoolSpec
from kernels.operands import CompressorSpec, Pages, Ragged, Ring, RopeTable
from kernels.reference.norm import norm
from kernels.staging import staged
from kernels.triton.engine.rows import normed, store_rows, turned


def compress(
    projected: Tensor, spec: CompressorSpec, ragged: Ragged, ring: Ring, pages: Pages, rope: RopeTable
) -> None:
    """As reference.compress.compress."""
    place = (pages.storage, pages.storage.stride(0), pages.offset)
    _launch(projected, spec, ragged, ring, rope, place, pages.entries)
    store_rows(projected, spec.column, ragged, ring)


def compressed(projected: Tensor, spec: CompressorSpec, ragged: Ragged, ring: Ring, rope: RopeTable) -> Tensor:
    """The same, but for where entries go: fp32 [windows, width]. Those of nobody's windows are not written."""
    out = projected.new_empty(len(staged(ragged, projected.device).windows[spec.rate][0]), spec.width)
    _launch(projected, spec, ragged, ring, rope, (out, out.stride(0), 0), 0)
    store_rows(projected, spec.column, ragged, ring)
    return out


def _launch(
    projected: Tensor, spec: CompressorSpec, ragged: Ragged, ring: Ring, rope: RopeTable,
    place: tuple[Tensor, int, int], entries: int,
) -> None:  # fmt: skip
    """Entries go to `place`: storage, elements of one of its rows, and the first; `entries` of a page, 0: one a row."""
    on = staged(ragged, projected.device)
    sequence, window = on.windows[spec.rate]
    if len(sequence):
        _compress[(len(sequence),)](
            projected, projected.stride(0), sequence, window, on.starts, on.context, on.slots, on.tables,
            on.tables.stride(0), ring.storage, ring.storage.stride(0), ring.offset, *place, spec.bias, spec.norm,
            rope.cos, rope.sin, spec.norm_eps, COLUMN=spec.column, CAPACITY=ring.capacity, ENTRIES=entries,
            RATE=spec.rate, WIDTH=spec.width, PAIRS=rope.cos.shape[1], PARTS=2 if spec.overlap else 1,
            WIDE=triton.next_power_of_2(spec.width), num_warps=4,
        )  # fmt: skip


def pool(projected: Tensor, spec: PoolSpec, ragged: Ragged, ring: Ring | None) -> Tensor:
    """As reference.csa2.pool."""
    on = staged(ragged, projected.device)
    sequence, window = on.windows[spec.rate]
    if ring is None:
        row = sequence.clamp_min(0)  # of nobody: anyone, for its entry is not stored
        at = (on.starts[row] - on.context[row] + window).clamp(0, len(projected) - 1)
        return norm(projected[at, spec.column : spec.column + spec.width], spec.norm, spec.norm_eps)
    out = projected.new_empty(len(sequence), spec.width)
    if len(sequence):
        _pool_rows[(len(sequence),)](
            projected, projected.stride(0), sequence, window, on.starts, on.context, on.slots, ring.storage,
            ring.storage.stride(0), ring.offset, spec.norm, out, spec.norm_eps, COLUMN=spec.column,
            CAPACITY=ring.capacity, RATE=spec.rate, WIDTH=spec.width, WIDE=triton.next_power_of_2(spec.width),
            num_warps=4,
        )  # fmt: skip
    store_rows(projected, spec.column, ragged, ring)
    return out


def store_entries(values: Tensor, ragged: Ragged, pages: Pages) -> None:
    """As reference.csa2.store_entries."""
    on = staged(ragged, values.device)
    sequence, window = on.windows[pages.rate]
    if len(values):
        _store_entries[(len(values),)](
            values, sequence, window, on.tables, on.tables.stride(0), pages.storage, pages.storage.stride(0),
            pages.offset, ENTRIES=pages.entries, WIDTH=pages.width, WIDE=triton.next_power_of_2(pages.width),
            num_warps=1,
        )  # fmt: skip


@triton.jit
def _pool(
    most, total, mixed, first, gate_bias, projected, stride, start, context, slot_rows, channel, COLUMN: tl.constexpr,
    CAPACITY: tl.constexpr, RATE: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """Go on with a softmax per channel over RATE rows from position `first` on; their part PART counts."""
    inside = channel < WIDTH
    for j in range(RATE):
        at = first + j
        fresh = projected + (start + at - context) * stride + COLUMN + PART * WIDTH + channel
        kept = slot_rows + (at % CAPACITY) * (2 * PARTS * WIDTH) + PART * WIDTH + channel
        is_new = at >= context
        content = tl.load(fresh, mask=inside & is_new, other=0.0)
        content += tl.load(kept, mask=inside & (at < context), other=0.0)
        gate = tl.load(fresh + PARTS * WIDTH, mask=inside & is_new, other=0.0)
        gate += tl.load(kept + PARTS * WIDTH, mask=inside & (at < context), other=0.0)
        if BIASED:
            gate += tl.load(gate_bias + j * (PARTS * WIDTH) + PART * WIDTH + channel, mask=inside, other=0.0)
        peak = tl.maximum(most, gate)
        shrink, weight = tl.exp(most - peak), tl.exp(gate - peak)
        total, mixed, most = total * shrink + weight, mixed * shrink + weight * content, peak
    return most, total, mixed


@triton.jit
def _compress(
    projected, stride, sequences, windows, starts, contexts, slots, tables, table_stride, ring, slot_stride,
    ring_offset, storage, page_stride, offset, bias, norm, cosine, sine, eps, COLUMN: tl.constexpr,
    CAPACITY: tl.constexpr, ENTRIES: tl.constexpr, RATE: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    PARTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    done = tl.program_id(0)
    sequence = tl.load(sequences + done).to(tl.int64)
    if sequence >= 0:
        window, channel = tl.load(windows + done), tl.arange(0, WIDE)
        start, context = tl.load(starts + sequence).to(tl.int64), tl.load(contexts + sequence)
        slot_rows = ring + tl.load(slots + sequence).to(tl.int64) * slot_stride + ring_offset
        most = tl.full((WIDE,), -float("inf"), tl.float32)
        total, mixed = tl.zeros((WIDE,), tl.float32), tl.zeros((WIDE,), tl.float32)
        if PARTS == 2 and window > 0:
            most, total, mixed = _pool(
                most, total, mixed, (window - 1) * RATE, bias, projected, stride, start, context, slot_rows, channel,
                COLUMN, CAPACITY, RATE, WIDTH, PARTS, 0, True,
            )  # fmt: skip
        most, total, mixed = _pool(
            most, total, mixed, window * RATE, bias, projected, stride, start, context, slot_rows, channel, COLUMN,
            CAPACITY, RATE, WIDTH, PARTS, PARTS - 1, True,
        )  # fmt: skip
        entry = tl.where(channel < WIDTH, mixed / total, 0.0)
        at = (window * RATE).to(tl.int64)
        entry = turned(normed(entry, norm, channel, eps, WIDTH), at, cosine, sine, channel, 1.0, WIDTH, PAIRS, WIDE)
        if ENTRIES == 0:
            target = storage + done.to(tl.int64) * page_stride + channel
        else:
            page = tl.load(tables + sequence * table_stride + window // ENTRIES).to(tl.int64)
            target = storage + page * page_stride + offset + (window % ENTRIES) * WIDTH + channel
        tl.store(target, entry.to(storage.dtype.element_ty), mask=channel < WIDTH)


@triton.jit
def _pool_rows(
    projected, stride, sequences, windows, starts, contexts, slots, ring, slot_stride, ring_offset, norm, out, eps,
    COLUMN: tl.constexpr, CAPACITY: tl.constexpr, RATE: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One window pooled and normed."""
    done = tl.program_id(0).to(tl.int64)
    sequence, channel = tl.load(sequences + done).to(tl.int64), tl.arange(0, WIDE)
    if sequence >= 0:
        start, context = tl.load(starts + sequence).to(tl.int64), tl.load(contexts + sequence)
        slot_rows = ring + tl.load(slots + sequence).to(tl.int64) * slot_stride + ring_offset
        most = tl.full((WIDE,), -float("inf"), tl.float32)
        total, mixed = tl.zeros((WIDE,), tl.float32), tl.zeros((WIDE,), tl.float32)
        most, total, mixed = _pool(
            most, total, mixed, tl.load(windows + done) * RATE, projected, projected, stride, start, context,
            slot_rows, channel, COLUMN, CAPACITY, RATE, WIDTH, 1, 0, False,
        )  # fmt: skip
        entry = tl.where(channel < WIDTH, mixed / total, 0.0)
        tl.store(out + done * WIDTH + channel, normed(entry, norm, channel, eps, WIDTH), mask=channel < WIDTH)


@triton.jit
def _store_entries(
    values, sequences, windows, tables, table_stride, storage, page_stride, offset, ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    done = tl.program_id(0).to(tl.int64)
    sequence, window, channel = tl.load(sequences + done).to(tl.int64), tl.load(windows + done), tl.arange(0, WIDE)
    if sequence >= 0:
        page = tl.load(tables + sequence * table_stride + window // ENTRIES).to(tl.int64)
        value = tl.load(values + done * WIDTH + channel, mask=channel < WIDTH, other=0.0)
        target = storage + page * page_stride + offset + (window % ENTRIES) * WIDTH + channel
        tl.store(target, value.to(storage.dtype.element_ty), mask=channel < WIDTH)
