"""Engram on a GPU: hash, gather and gate; formulas: kernels/reference/engram.py.

One launch each into memory that is there, no workspace: they capture into CUDA graphs. A token's bits depend on that
token alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.engram import check_gate, check_gather, check_hash
from kernels.triton.rms_norm import Turns

_HASHED_TOKENS = 16


def turns_for(rows: int) -> Turns:
    """What was fastest on an H200 (docs/benchmarks.md)."""
    return Turns(4, 1056) if rows > 1056 else Turns(8)


def hash_rows(recent: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad: int, rows: Tensor) -> None:
    """Fill rows int64 [tokens, layers, columns]; operands as in the definition. Raises KernelError."""
    check_hash(recent, multipliers, primes, offsets, rows)
    tokens, longest = recent.shape
    layers, columns = primes.shape
    if tokens and columns:
        _hash[(triton.cdiv(tokens, _HASHED_TOKENS), layers)](
            recent, multipliers, primes, offsets, rows, tokens, pad, layers, LONGEST=longest, COLUMNS=columns,
            PADDED=triton.next_power_of_2(columns), TOKENS=_HASHED_TOKENS, num_warps=4,
        )  # fmt: skip


def gather(rows: Tensor, codes: Tensor, scales: Tensor, out: Tensor, first: int = 0, together: int = 16) -> None:
    """Fill out bf16 [tokens, columns * width]; operands as in the definition. Raises KernelError."""
    check_gather(rows, codes, scales, out)
    launch_gather(rows, codes, scales, out, first, together)


def launch_gather(rows: Tensor, codes: Tensor, scales: Tensor, out: Tensor, first: int = 0, together: int = 16) -> None:
    """The same of operands that are known to fit; out may be fp32."""
    if rows.numel():
        _gather[(triton.cdiv(rows.numel(), together),)](
            rows, codes, scales, out, rows.numel(), first, codes.shape[0],
            WIDTH=codes.shape[1], TOGETHER=together, num_warps=4,
        )  # fmt: skip


def gate(
    x: Tensor, projected: Tensor, alive: Tensor, query: Tensor, key: Tensor, eps: float, out: Tensor,
    turns: Turns | None = None,
) -> None:  # fmt: skip
    """Fill out bf16 [rows, 4, hidden] (it may be x); operands as in the definition. Raises KernelError."""
    check_gate(x, projected, alive, query, key, out)
    launch_gate(x, projected, alive, query, key, eps, out, turns)


def launch_gate(
    x: Tensor, projected: Tensor, alive: Tensor, query: Tensor, key: Tensor, eps: float, out: Tensor,
    turns: Turns | None = None,
) -> None:  # fmt: skip
    """The same of operands that are known to fit: of any number of streams, in bf16 or fp32."""
    rows, streams, hidden = x.shape
    taken = turns or turns_for(rows)
    if rows:
        each = min(rows, -(-taken.programs // streams) or rows)
        _gate[(each * streams,)](
            x, projected, alive, query, key, out, rows, eps, STREAMS=streams, HIDDEN=hidden,
            BLOCK=triton.next_power_of_2(hidden), AHEAD=taken.ahead, TURNS=bool(taken.programs), num_warps=taken.warps,
        )  # fmt: skip


@triton.jit
def _hash(
    recent, multipliers, primes, offsets, rows, tokens, pad, layers,
    LONGEST: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of one layer."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    layer = tl.program_id(1)
    column = tl.arange(0, PADDED)
    length = column // (COLUMNS // (LONGEST - 1))
    inside, there = column < COLUMNS, token < tokens
    whole = tl.full((TOKENS,), 1, tl.int1)
    mixed = tl.zeros((TOKENS,), tl.int64)
    found = tl.zeros((TOKENS, PADDED), tl.int64)
    for place in tl.static_range(LONGEST):
        given = tl.load(recent + token.to(tl.int64) * LONGEST + place, mask=there, other=-1)
        whole = whole & (given != -1)
        mixed ^= tl.where(whole, given, pad) * tl.load(multipliers + layer * LONGEST + place)
        if place > 0:
            found = tl.where((length == place - 1)[None, :], mixed[:, None], found)
    prime = tl.load(primes + layer * COLUMNS + column, mask=inside, other=1)
    named = found % prime[None, :] + tl.load(offsets + layer * COLUMNS + column, mask=inside, other=0)[None, :]
    place_of = (token.to(tl.int64)[:, None] * layers + layer) * COLUMNS + column[None, :]
    tl.store(rows + place_of, named, mask=there[:, None] & inside[None, :])


@triton.jit
def _gather(rows, codes, scales, out, count, first, held, WIDTH: tl.constexpr, TOGETHER: tl.constexpr):
    """TOGETHER table rows."""
    which = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    row = tl.load(rows + which, mask=which < count, other=-1) - first
    row = tl.where(which < count, row, -1)
    there = ((row >= 0) & (row < held))[:, None, None]
    group = tl.arange(0, WIDTH // 32)
    column = group[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    code = tl.load(codes + row[:, None, None] * WIDTH + column, mask=there, other=0.0).to(tl.float32)
    byte = tl.load(
        scales + row[:, None] * (WIDTH // 32) + group[None, :], mask=tl.reshape(there, (TOGETHER, 1)), other=127
    )
    byte = byte.to(tl.int32)
    power = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23)).to(tl.float32, bitcast=True)
    value = code * tl.expand_dims(power, 2)
    place = out + which[:, None, None] * WIDTH + column
    tl.store(place, value.to(out.dtype.element_ty), mask=(which < count)[:, None, None])


@triton.jit
def _gate(
    x, projected, alive, query, key, out, rows, eps,
    STREAMS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """One stream of row program_id(0) / STREAMS, or of that and every so many-th after it."""
    stream = tl.program_id(0) % STREAMS
    start = tl.program_id(0) // STREAMS
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    weight = tl.load(query + stream * HIDDEN + column, mask=inside, other=0.0)
    weight *= tl.load(key + stream * HIDDEN + column, mask=inside, other=0.0)
    last = rows if TURNS else start + 1
    for turn in tl.range(start, last, tl.num_programs(0) // STREAMS, num_stages=AHEAD):
        row = tl.cast(turn, tl.int64)
        place = (row * STREAMS + stream) * HIDDEN + column
        beside = projected + row * ((STREAMS + 1) * HIDDEN) + column
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        keys = tl.load(beside + stream * HIDDEN, mask=inside, other=0.0).to(tl.float32)
        memory = tl.load(beside + STREAMS * HIDDEN, mask=inside, other=0.0).to(tl.float32)
        unit = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps) * tl.rsqrt(tl.sum(keys * keys, 0) / HIDDEN + eps)
        dot = tl.sum(value * weight * keys, 0) * unit / tl.sqrt(HIDDEN * 1.0)
        root = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
        opened = tl.where(tl.load(alive + row), tl.sigmoid(tl.where(dot < 0, -root, root)), 0.0)
        tl.store(out + place, (value + opened * memory).to(out.dtype.element_ty), mask=inside)
