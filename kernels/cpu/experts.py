"""Expert MLPs on the CPU: rows sorted by expert, every expert's panels multiplied once for all its rows."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel, serial
from kernels.cpu.linear import rounded
from kernels.cpu.numbers import fma, round_bf16, sigmoid
from kernels.cpu.tile import LANES, WIDE, panels_product
from kernels.operands import ExpertBank


def experts(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, bank: ExpertBank) -> torch.Tensor:
    """As reference.experts.experts."""
    out = torch.empty_like(x)
    rounds = bank.gate.rounds
    source = rounded(x) if rounds else x
    expert_rows(
        source.numpy(), chosen.numpy(), weights.numpy(), bank.gate.array, bank.up.array, bank.down.array, bank.experts,
        bank.inner, bank.limit, rounds, out.numpy(),
    )  # fmt: skip
    return out


@serial
def _group(chosen: Array, experts: int, starts: Array, place: Array, active: Array) -> int:
    """place[row, k] = where a pair stands once pairs are sorted by expert; every row is also a pair of the last.

    Returns how many experts have rows; `active` lists them.
    """
    starts[:] = 0
    for row in range(chosen.shape[0]):
        for k in range(chosen.shape[1]):
            starts[chosen[row, k] + 1] += 1
    starts[experts + 1] = chosen.shape[0]
    busy = 0
    for e in range(experts + 1):
        if starts[e + 1] > 0:
            active[busy] = e
            busy += 1
        starts[e + 1] += starts[e]
    filled = starts.copy()
    for row in range(chosen.shape[0]):
        for k in range(chosen.shape[1]):
            place[row, k] = filled[chosen[row, k]]
            filled[chosen[row, k]] += 1
        place[row, chosen.shape[1]] = starts[experts] + row
    return busy


@serial
def _activate(gate: Array, up: Array, limit: float, rounds: bool, out: Array, first: int, column: int) -> None:
    """out[first + r, column + l] = silu(min(gate, limit)) * clamp(up, -limit, limit)."""
    bound = np.float32(limit)
    for r in range(gate.shape[0]):
        for lane in range(min(gate.shape[1], out.shape[1] - column)):
            g = min(gate[r, lane], bound)
            value = g * sigmoid(g) * min(max(up[r, lane], -bound), bound)
            out[first + r, column + lane] = round_bf16(value) if rounds else value


@parallel
def expert_rows(
    x: Array, chosen: Array, weights: Array, gate: Array, up: Array, down: Array, experts: int, inner: int,
    limit: float, rounds: bool, out: Array,
) -> None:  # fmt: skip
    rows, hidden = x.shape
    topk = chosen.shape[1]
    starts, place = np.empty(experts + 2, np.int64), np.empty((rows, topk + 1), np.int64)
    active = np.empty(experts + 1, np.int64)
    busy = _group(chosen, experts, starts, place, active)
    sorted_x = np.empty((rows * (topk + 1), hidden), np.float32)
    for row in prange(rows):
        for k in range(topk + 1):
            for c in range(hidden):
                sorted_x[place[row, k], c] = x[row, c]
    middle = np.empty((len(sorted_x), inner), np.float32)
    inner_panels, hidden_panels = gate.shape[0] // (experts + 1), down.shape[0] // (experts + 1)
    inner_tasks, hidden_tasks = (inner_panels + WIDE - 1) // WIDE, (hidden_panels + WIDE - 1) // WIDE
    for task in prange(inner_tasks * busy):
        e, p = active[task % busy], task // busy * WIDE
        first, count, panels = starts[e], starts[e + 1] - starts[e], min(WIDE, inner_panels - p)
        at, size, lanes = (e * inner_panels + p) * hidden * LANES, hidden * LANES, panels * LANES
        gates, ups = np.empty((count, lanes), np.float32), np.empty((count, lanes), np.float32)
        x_at = first * hidden
        panels_product(sorted_x, x_at, hidden, 1, count, gate, at, LANES, size, panels, hidden, gates, 0, lanes)
        panels_product(sorted_x, x_at, hidden, 1, count, up, at, LANES, size, panels, hidden, ups, 0, lanes)
        _activate(gates, ups, limit, rounds, middle, first, p * LANES)
    stride, size = hidden_panels * LANES, inner * LANES
    results = np.empty((len(sorted_x), stride), np.float32)
    for task in prange(hidden_tasks * busy):
        e, p = active[task % busy], task // busy * WIDE
        first, count, panels = starts[e], starts[e + 1] - starts[e], min(WIDE, hidden_panels - p)
        panels_product(
            middle, first * inner, inner, 1, count, down, (e * hidden_panels + p) * size, LANES, size, panels, inner,
            results, first * stride + p * LANES, stride,
        )  # fmt: skip
    for row in prange(rows):
        for c in range(hidden):
            out[row, c] = results[place[row, topk], c]
        for k in range(topk):
            for c in range(hidden):
                out[row, c] = fma(weights[row, k], results[place[row, k], c], out[row, c])
