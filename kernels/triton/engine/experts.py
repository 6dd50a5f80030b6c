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
from kernels.triton.engine.few_experts import chosen_rows, gated
from kernels.triton.engine.linear import NARROW, is_few
from kernels.triton.engine.rows import norm as norm_rows


def experts(x: Tensor, chosen: Tensor, weights: Tensor, bank: ExpertBank) -> Tensor:
    """As reference.experts.experts."""
    return expert_rows(x, chosen, weights, bank, None, 0.0, None)


def expert_rows(
    x: Tensor, chosen: Tensor, weights: Tensor, bank: ExpertBank, norm: Tensor | None, eps: float,
    residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """As `experts` of x normed with `norm`, plus `residual`, where they are given."""
    if is_few(*x.shape) and x.shape[1] <= NARROW:
        return chosen_rows(x, chosen, weights, bank, norm, eps, residual)
    return many(x if norm is None else norm_rows(x, norm, eps), chosen, weights, bank, residual)


def many(
    x: Tensor, chosen: Tensor, weights: Tensor, bank: ExpertBank, residual: Tensor | None, block: int = 0
) -> Tensor:
    """Each expert is a product of the rows that chose it; a place is a number `row * slots + slot`."""
    (rows, hidden), slots, inner, count = x.shape, chosen.shape[1] + 1, bank.inner, bank.experts + 1
    kind = torch.bfloat16 if bank.gate.rounds else torch.float32
    middle = torch.empty(rows * slots, inner, dtype=kind, device=x.device)
    parts, out = (torch.empty(size, hidden, device=x.device) for size in (rows * slots, rows))
    places = torch.empty(count, rows, dtype=torch.int32, device=x.device)
    counts = torch.empty(count, dtype=torch.int32, device=x.device)
    _gather[(count,)](chosen, places, counts, rows, SLOTS=slots, LAST=bank.experts, LANES=1024, num_warps=4, **LAUNCH)
    block = block or max(16, min(64, triton.next_power_of_2(2 * triton.cdiv(rows * slots, count))))
    blocks = triton.cdiv(rows, block)
    shape = {"ROWS": block, "DEEP": 64 if bank.gate.rounds else 32, "SLOTS": slots, "ROUNDS": bank.gate.rounds}
    limited = math.isfinite(bank.limit)
    _entering[(triton.cdiv(inner, 64), blocks, count)](
        x.to(kind), bank.gate.matrix, bank.up.matrix, places, counts, middle, bank.limit if limited else 0.0, rows,
        hidden, inner, COLUMNS=64, LIMITED=limited, num_warps=4, num_stages=3, **shape, **LAUNCH,
    )  # fmt: skip
    _leaving[(triton.cdiv(hidden, 64), blocks, count)](
        middle, bank.down.matrix, places, counts, weights, parts, rows, hidden, inner, COLUMNS=64, num_warps=4,
        num_stages=3, **shape, **LAUNCH,
    )  # fmt: skip
    wide = triton.next_power_of_2(hidden)
    _sum_slots[(rows, triton.cdiv(hidden, 1024))](
        parts, x if residual is None else residual, out, hidden, SLOTS=slots, WIDE=min(wide, 1024),
        ADD=residual is not None, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _gather(
    chosen, places, counts, rows, SLOTS: tl.constexpr, LAST: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """The places that chose one expert, in their order, and how many there are."""
    follow()
    chain()
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


@triton.jit(do_not_specialize=["rows"])
def _entering(
    x, gate, up, places, counts, middle, limit, rows, hidden, inner, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEEP: tl.constexpr, SLOTS: tl.constexpr, LIMITED: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """silu(gate x) * up x for COLUMNS channels of one expert and ROWS of its places."""
    follow()
    chain()
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
        result = gated(opened, raised, limit, LIMITED)
        target = middle + place[:, None] * inner + line[None, :]
        tl.store(target, result.to(middle.dtype.element_ty), mask=(lane < count)[:, None] & (line < inner)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _leaving(
    middle, down, places, counts, weights, parts, rows, hidden, inner, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEEP: tl.constexpr, SLOTS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """COLUMNS outputs of one expert for ROWS of its places, times their weights."""
    follow()
    chain()
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
    follow()
    chain()
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    total = tl.zeros((WIDE,), tl.float32)
    if ADD:
        total += tl.load(residual + row * hidden + at, mask=at < hidden, other=0.0)
    for slot in tl.static_range(SLOTS):
        total += tl.load(parts + (row * SLOTS + slot) * hidden + at, mask=at < hidden, other=0.0)
    tl.store(out + row * hidden + at, total, mask=at < hidden)
