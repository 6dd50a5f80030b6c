"""Rows of a projection on a GPU: query latents and window keys read out of it, and rings of the newest rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operands import LatentSpec, Ragged, Ring, RopeTable
from kernels.staging import staged
from kernels.triton.engine.chained import LAUNCH, chain, follow

_FP32 = torch.float32
_CHANNELS = 4096  # of a row, that four warps take


def latent(
    projected: Tensor, spec: LatentSpec, ragged: Ragged, rope: RopeTable, kv_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As reference.latent.latent."""
    rows, rank, width, pairs = len(projected), spec.query_norm.shape[0], spec.key_norm.shape[0], rope.cos.shape[1]
    query = projected.new_empty(rows, rank)
    keys = torch.empty(rows, width, dtype=kv_dtype, device=projected.device)
    _latent[(rows,)](
        projected, projected.stride(0), spec.query_norm, spec.key_norm, staged(ragged, projected.device).positions,
        rope.cos, rope.sin, query, keys, spec.norm_eps, RANK=rank, WIDTH=width, PAIRS=pairs,
        WIDE=triton.next_power_of_2(rank), KEY=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return query, keys


def norm(x: Tensor, weight: Tensor, eps: float, kind: torch.dtype = _FP32) -> Tensor:
    """As reference.norm.norm, rounded to `kind`; rows of x may stand apart."""
    out = x.new_empty(x.shape, dtype=kind)
    _launch(x, x, weight, x, out, out, eps, add=False)
    return out


def add_norm(x: Tensor, more: Tensor, weight: Tensor, eps: float, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x + more, both [rows, width]; its norm; and that rounded to `kind`, of which one is all there is in fp32."""
    total, normed = torch.empty_like(x), torch.empty_like(x)
    rounded = normed if kind == _FP32 else x.new_empty(x.shape, dtype=kind)
    _launch(x, more, weight, total, normed, rounded, eps, add=True)
    return total, normed, rounded


def _launch(
    x: Tensor, more: Tensor, weight: Tensor, total: Tensor, normed: Tensor, rounded: Tensor, eps: float, add: bool
) -> None:
    rows, width = x.shape
    wide = triton.next_power_of_2(width)
    if rows:
        _norm[(rows,)](
            x, x.stride(0), more, weight, total, normed, rounded, eps, WIDTH=width, WIDE=wide, ADD=add,
            BOTH=rounded is not normed, num_warps=4 if wide <= _CHANNELS else 8, **LAUNCH,
        )  # fmt: skip


def store_rows(rows: Tensor, column: int, ragged: Ragged, ring: Ring) -> None:
    """As reference.storage.store_rows."""
    on = staged(ragged, rows.device)
    _store_rows[(len(rows),)](
        rows, rows.stride(0), column, on.positions, on.sequences, on.starts, on.context, on.slots, ring.storage,
        ring.storage.stride(0), ring.offset, CAPACITY=ring.capacity, WIDTH=ring.width,
        WIDE=triton.next_power_of_2(ring.width), num_warps=4,
    )  # fmt: skip


@triton.jit
def normed(value, weight, channel, eps, WIDTH: tl.constexpr):
    """The root-mean-square norm of `value` (0 beyond WIDTH), times `weight`."""
    value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    return value * tl.load(weight + channel, mask=channel < WIDTH, other=0.0)


@triton.jit
def _norm(
    x, stride, more, weight, total, out, rounded, eps, WIDTH: tl.constexpr, WIDE: tl.constexpr, ADD: tl.constexpr,
    BOTH: tl.constexpr,
):  # fmt: skip
    """One row. Weights are nobody's result: they are asked for before the kernels ahead have ended."""
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    inside = channel < WIDTH
    follow()
    share = tl.load(weight + channel, mask=inside, other=0.0)
    chain()
    value = tl.load(x + row * stride + channel, mask=inside, other=0.0)
    if ADD:
        value += tl.load(more + row * WIDTH + channel, mask=inside, other=0.0)
        tl.store(total + row * WIDTH + channel, value, mask=inside)
    value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    value *= share
    tl.store(out + row * WIDTH + channel, value.to(out.dtype.element_ty), mask=inside)
    if BOTH:
        tl.store(rounded + row * WIDTH + channel, value.to(rounded.dtype.element_ty), mask=inside)


@triton.jit
def turned(value, at, cosine, sine, channel, sign, WIDTH: tl.constexpr, PAIRS: tl.constexpr, WIDE: tl.constexpr):
    """`value` [WIDE] whose trailing pairs are turned to position `at`; turned back where `sign` is -1."""
    even, odd = tl.split(tl.reshape(value, (WIDE // 2, 2)))
    pair = tl.arange(0, WIDE // 2) - (WIDTH // 2 - PAIRS)
    inside = (pair >= 0) & (pair < PAIRS)
    c = tl.load(cosine + at * PAIRS + pair, mask=inside, other=1.0)
    s = tl.load(sine + at * PAIRS + pair, mask=inside, other=0.0) * sign
    return tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), (WIDE,))


@triton.jit
def _latent(
    projected, stride, query_norm, key_norm, positions, cosine, sine, query, keys, eps, RANK: tl.constexpr,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, WIDE: tl.constexpr, KEY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel, key = tl.arange(0, WIDE), tl.arange(0, KEY)
    source = projected + row * stride
    value = tl.load(source + channel, mask=channel < RANK, other=0.0)
    tl.store(query + row * RANK + channel, normed(value, query_norm, channel, eps, RANK), mask=channel < RANK)
    at = tl.maximum(tl.load(positions + row), 0).to(tl.int64)
    value = normed(tl.load(source + RANK + key, mask=key < WIDTH, other=0.0), key_norm, key, eps, WIDTH)
    value = turned(value, at, cosine, sine, key, 1.0, WIDTH, PAIRS, KEY)
    tl.store(keys + row * WIDTH + key, value.to(keys.dtype.element_ty), mask=key < WIDTH)


@triton.jit
def _store_rows(
    rows, stride, column, positions, sequences, starts, context, slots, storage, slot_stride, offset,
    CAPACITY: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One row to its place in its sequence's ring, if no later row of the batch has that place."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(positions + row)
    sequence = tl.load(sequences + row)
    slot = tl.load(slots + sequence).to(tl.int64)
    end = tl.load(context + sequence) + tl.load(starts + sequence + 1) - tl.load(starts + sequence)
    if (at >= 0) & (slot >= 0) & (at >= end - CAPACITY):
        target = storage + slot * slot_stride + offset + (at % CAPACITY) * WIDTH
        for first in range(0, WIDTH, WIDE):
            channel = first + tl.arange(0, WIDE)
            value = tl.load(rows + row * stride + column + channel, mask=channel < WIDTH, other=0.0)
            tl.store(target + channel, value.to(storage.dtype.element_ty), mask=channel < WIDTH)
