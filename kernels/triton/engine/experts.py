"""Expert MLPs on a GPU: only chosen experts' weights are read, once for the rows that chose them. Nothing is counted
on the host."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operands import ExpertBank
from kernels.triton.engine.chained import LAUNCH, chain, follow
from kernels.triton.engine.linear import FEW_ROWS, rounded
from kernels.triton.engine.rows import norm as norm_rows

_ENTERING, _LEAVING = 2, 2  # outputs of one program of the few-row products


def experts(x: Tensor, chosen: Tensor, weights: Tensor, bank: ExpertBank) -> Tensor:
    """As reference.experts.experts."""
    return expert_rows(x, chosen, weights, bank, None, 0.0, None)


def expert_rows(
    x: Tensor, chosen: Tensor, weights: Tensor, bank: ExpertBank, norm: Tensor | None, eps: float,
    residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """As `experts` of x normed with `norm`, plus `residual`, where they are given."""
    if len(x) <= FEW_ROWS:
        return _few(x, chosen, weights, bank, norm, eps, residual)
    return _many(x if norm is None else norm_rows(x, norm, eps), chosen, weights, bank, residual)


def _few(
    x: Tensor, chosen: Tensor, weights: Tensor, bank: ExpertBank, norm: Tensor | None, eps: float,
    residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """One program for a few outputs of one row's one expert."""
    (rows, hidden), slots, inner = x.shape, chosen.shape[1] + 1, bank.inner
    middle, out = x.new_empty(rows, slots, inner), x.new_empty(rows, hidden)
    tile = min(triton.next_power_of_2(hidden), 2048)
    limited = math.isfinite(bank.limit)
    _few_entering[(triton.cdiv(inner, _ENTERING), slots, rows)](
        x, bank.gate.matrix, bank.up.matrix, x if norm is None else norm, chosen, middle, eps,
        bank.limit if limited else 0.0, hidden, inner, SLOTS=slots, LAST=bank.experts, LINES=_ENTERING, TILE=tile,
        TURNS=triton.cdiv(hidden, tile), NORM=norm is not None, LIMITED=limited, ROUNDS=bank.gate.rounds,
        num_warps=4, **LAUNCH,
    )  # fmt: skip
    tile = min(triton.next_power_of_2(inner), 512)
    _few_leaving[(triton.cdiv(hidden, _LEAVING), rows)](
        middle, bank.down.matrix, chosen, weights, x if residual is None else residual, out, hidden, inner,
        SLOTS=slots, LANES=triton.next_power_of_2(slots), LAST=bank.experts, LINES=_LEAVING, TILE=tile,
        TURNS=triton.cdiv(inner, tile), ADD=residual is not None, ROUNDS=bank.down.rounds, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return out


def _many(x: Tensor, chosen: Tensor, weights: Tensor, bank: ExpertBank, residual: Tensor | None) -> Tensor:
    """Each expert is a product of the rows that chose it; a place is a number `row * slots + slot`."""
    (rows, hidden), slots, inner, count = x.shape, chosen.shape[1] + 1, bank.inner, bank.experts + 1
    kind = torch.bfloat16 if bank.gate.rounds else torch.float32
    middle = torch.empty(rows * slots, inner, dtype=kind, device=x.device)
    parts, out = x.new_empty(rows * slots, hidden), x.new_empty(rows, hidden)
    places = torch.empty(count, rows, dtype=torch.int32, device=x.device)
    counts = torch.empty(count, dtype=torch.int32, device=x.device)
    _gather[(count,)](chosen, places, counts, rows, SLOTS=slots, LAST=bank.experts, LANES=1024, num_warps=4)
    block = max(16, min(64, triton.next_power_of_2(2 * triton.cdiv(rows * slots, count))))
    blocks = triton.cdiv(rows, block)
    shape = {"ROWS": block, "DEEP": 64 if bank.gate.rounds else 32, "SLOTS": slots, "ROUNDS": bank.gate.rounds}
    limited = math.isfinite(bank.limit)
    _entering[(triton.cdiv(inner, 64), blocks, count)](
        x.to(kind), bank.gate.matrix, bank.up.matrix, places, counts, middle, bank.limit if limited else 0.0, rows,
        hidden, inner, COLUMNS=64, LIMITED=limited, num_warps=4, num_stages=3, **shape,
    )  # fmt: skip
    _leaving[(triton.cdiv(hidden, 64), blocks, count)](
        middle, bank.down.matrix, places, counts, weights, parts, rows, hidden, inner, COLUMNS=64, num_warps=4,
        num_stages=3, **shape,
    )  # fmt: skip
    wide = triton.next_power_of_2(hidden)
    _sum_slots[(rows, triton.cdiv(hidden, 1024))](
        parts, x if residual is None else residual, out, hidden, SLOTS=slots, WIDE=min(wide, 1024),
        ADD=residual is not None, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _gather(
    chosen, places, counts, rows, SLOTS: tl.constexpr, LAST: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """The places that chose one expert, in their order, and how many there are."""
    expert = tl.program_id(0)
    found = 0
    for first in range(0, rows * SLOTS, LANES):
        place = first + tl.arange(0, LANES)
        slot, row = place % SLOTS, place // SLOTS
        name = tl.load(chosen + row * (SLOTS - 1) + slot, mask=(row < rows) & (slot < SLOTS - 1), other=LAST)
        mine = (name == expert) & (row < rows)
        rank = found + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(places + expert * rows + rank, place, mask=mine)
        found += tl.sum(mine.to(tl.int32), 0)
    tl.store(counts + expert, found)


@triton.jit
def _entering(
    x, gate, up, places, counts, middle, limit, rows, hidden, inner, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEEP: tl.constexpr, SLOTS: tl.constexpr, LIMITED: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """silu(gate x) * up x for COLUMNS channels of one expert and ROWS of its places."""
    expert, first = tl.program_id(2).to(tl.int64), tl.program_id(1) * ROWS
    count = tl.load(counts + expert)
    if first < count:
        lane = first + tl.arange(0, ROWS)
        place = tl.load(places + expert * rows + lane, mask=lane < count, other=0).to(tl.int64)
        line, depth = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEEP)
        source = x + (place // SLOTS)[:, None] * hidden
        begin = expert * inner * hidden + line[:, None].to(tl.int64) * hidden
        opened, raised = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, hidden, DEEP):
            at = start + depth
            inside = (line < inner)[:, None] & (at < hidden)[None, :]
            value = tl.load(source + at[None, :], mask=(lane < count)[:, None] & (at < hidden)[None, :], other=0.0)
            first_matrix = tl.load(gate + begin + at[None, :], mask=inside, other=0.0)
            second_matrix = tl.load(up + begin + at[None, :], mask=inside, other=0.0)
            opened = tl.dot(value, tl.trans(first_matrix), opened, input_precision="tf32x3")
            raised = tl.dot(value, tl.trans(second_matrix), raised, input_precision="tf32x3")
        result = _gated(opened, raised, limit, LIMITED)
        target = middle + place[:, None] * inner + line[None, :]
        tl.store(target, result.to(middle.dtype.element_ty), mask=(lane < count)[:, None] & (line < inner)[None, :])


@triton.jit
def _leaving(
    middle, down, places, counts, weights, parts, rows, hidden, inner, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEEP: tl.constexpr, SLOTS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """COLUMNS outputs of one expert for ROWS of its places, times their weights."""
    expert, first = tl.program_id(2).to(tl.int64), tl.program_id(1) * ROWS
    count = tl.load(counts + expert)
    if first < count:
        lane = first + tl.arange(0, ROWS)
        place = tl.load(places + expert * rows + lane, mask=lane < count, other=0).to(tl.int64)
        line, depth = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEEP)
        begin = expert * hidden * inner + line[:, None].to(tl.int64) * inner
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, inner, DEEP):
            at = start + depth
            mask = (lane < count)[:, None] & (at < inner)[None, :]
            value = tl.load(middle + place[:, None] * inner + at[None, :], mask=mask, other=0.0)
            inside = (line < hidden)[:, None] & (at < inner)[None, :]
            matrix = tl.load(down + begin + at[None, :], mask=inside, other=0.0)
            total = tl.dot(value, tl.trans(matrix), total, input_precision="tf32x3")
        slot, row = place % SLOTS, place // SLOTS
        weight = tl.load(weights + row * (SLOTS - 1) + slot, mask=(lane < count) & (slot < SLOTS - 1), other=1.0)
        target = parts + place[:, None] * hidden + line[None, :]
        tl.store(target, total * weight[:, None], mask=(lane < count)[:, None] & (line < hidden)[None, :])


@triton.jit
def _sum_slots(
    parts, residual, out, hidden, SLOTS: tl.constexpr, WIDE: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    total = tl.zeros((WIDE,), tl.float32)
    if ADD:
        total += tl.load(residual + row * hidden + at, mask=at < hidden, other=0.0)
    for slot in tl.static_range(SLOTS):
        total += tl.load(parts + (row * SLOTS + slot) * hidden + at, mask=at < hidden, other=0.0)
    tl.store(out + row * hidden + at, total, mask=at < hidden)


@triton.jit
def _few_entering(
    x, gate, up, norm, chosen, middle, eps, limit, hidden, inner, SLOTS: tl.constexpr, LAST: tl.constexpr,
    LINES: tl.constexpr, TILE: tl.constexpr, TURNS: tl.constexpr, NORM: tl.constexpr, LIMITED: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """silu(gate x) * up x for LINES channels of the expert in one slot of one row; the last slot is the last expert."""
    follow()
    chain()
    slot, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    line, at = tl.program_id(0) * LINES + tl.arange(0, LINES), tl.arange(0, TILE)
    expert = tl.load(chosen + row * (SLOTS - 1) + slot, mask=slot < SLOTS - 1, other=LAST).to(tl.int64)
    begin = expert * inner * hidden + line[:, None].to(tl.int64) * hidden
    scale = 1.0
    if NORM:
        squares = tl.zeros((TILE,), tl.float32)
        for turn in tl.static_range(TURNS):
            value = tl.load(x + row * hidden + turn * TILE + at, mask=turn * TILE + at < hidden, other=0.0)
            squares += value * value
        scale = tl.rsqrt(tl.sum(squares, 0) / hidden + eps)
    opened, raised = tl.zeros((LINES, TILE), tl.float32), tl.zeros((LINES, TILE), tl.float32)
    for turn in tl.static_range(TURNS):
        place = turn * TILE + at
        inside = (line < inner)[:, None] & (place < hidden)[None, :]
        first = tl.load(gate + begin + place[None, :], mask=inside, other=0.0)
        second = tl.load(up + begin + place[None, :], mask=inside, other=0.0)
        value = tl.load(x + row * hidden + place, mask=place < hidden, other=0.0) * scale
        if NORM:
            value *= tl.load(norm + place, mask=place < hidden, other=0.0)
        value = rounded(value, ROUNDS)[None, :]
        opened += first.to(tl.float32) * value
        raised += second.to(tl.float32) * value
    result = _gated(tl.sum(opened, 1), tl.sum(raised, 1), limit, LIMITED)
    tl.store(middle + (row * SLOTS + slot) * inner + line, result, mask=line < inner)


@triton.jit
def _gated(opened, raised, limit, LIMITED: tl.constexpr):
    """silu(min(gate, limit)) * clamp(up, -limit, limit)."""
    if LIMITED:
        opened, raised = tl.minimum(opened, limit), tl.minimum(tl.maximum(raised, -limit), limit)
    return opened / (1 + tl.exp(-opened)) * raised


@triton.jit
def _few_leaving(
    middle, down, chosen, weights, residual, out, hidden, inner, SLOTS: tl.constexpr, LANES: tl.constexpr,
    LAST: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr, TURNS: tl.constexpr, ADD: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """LINES outputs of one row: the weighted sum over its slots, beginning with the last, whose expert is known."""
    row = tl.program_id(1).to(tl.int64)
    line, at = tl.program_id(0) * LINES + tl.arange(0, LINES), tl.arange(0, TILE)
    slot, total = tl.arange(0, LANES), tl.zeros((LINES, TILE), tl.float32)
    begin = (LAST * hidden + line[:, None]).to(tl.int64) * inner + at[None, :]
    follow()
    ahead = tl.load(down + begin, mask=(line < hidden)[:, None] & (at < inner)[None, :], other=0.0)
    chain()
    experts = tl.load(chosen + row * (SLOTS - 1) + slot, mask=slot < SLOTS - 1, other=LAST)
    shares = tl.load(weights + row * (SLOTS - 1) + slot, mask=slot < SLOTS - 1, other=1.0)
    for back in tl.static_range(SLOTS):
        one = SLOTS - 1 - back
        expert = tl.sum(tl.where(slot == one, experts, 0), 0).to(tl.int64)
        weight = tl.sum(tl.where(slot == one, shares, 0.0), 0)
        begin = expert * hidden * inner + line[:, None].to(tl.int64) * inner
        for turn in tl.static_range(TURNS):
            place = turn * TILE + at
            inside = (line < hidden)[:, None] & (place < inner)[None, :]
            if back == 0 and turn == 0:
                matrix = ahead
            else:
                matrix = tl.load(down + begin + place[None, :], mask=inside, other=0.0)
            value = tl.load(middle + (row * SLOTS + one) * inner + place, mask=place < inner, other=0.0)
            total += matrix.to(tl.float32) * (rounded(value, ROUNDS) * weight)[None, :]
    result, target = tl.sum(total, 1), row * hidden + line
    if ADD:
        result += tl.load(residual + target, mask=line < hidden, other=0.0)
    tl.store(out + target, result, mask=line < hidden)
