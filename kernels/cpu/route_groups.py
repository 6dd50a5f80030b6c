"""Expert choice within groups on the CPU: gate product, scores, groups and top-k in one pass."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel, serial
from kernels.cpu.linear import rounded
from kernels.cpu.numbers import exp, sigmoid
from kernels.cpu.sums import row_sum
from kernels.cpu.tile import LANES, panel_product
from kernels.operands import GroupRouterSpec

_CHUNK = 12


def route_groups(x: torch.Tensor, spec: GroupRouterSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """As reference.route_groups.route_groups."""
    rows, width = x.shape[0], spec.topk + spec.always
    chosen, weights = torch.empty(rows, width, dtype=torch.int32), torch.empty(rows, width)
    bias = torch.zeros(spec.experts) if spec.bias is None else spec.bias
    route_rows(
        (rounded(x) if spec.gate.rounds else x).numpy(), spec.gate.array, bias.numpy(), spec.topk, spec.groups,
        spec.kept_groups, spec.group_best, spec.sigmoid, spec.normalize, spec.scaling, chosen.numpy(), weights.numpy(),
    )  # fmt: skip
    return chosen, weights


@serial
def _score(scores: Array, row: int, count: int, is_sigmoid: bool) -> None:
    """scores[row, :count] become sigmoids, or the softmax over them."""
    highest = np.float32(-np.inf)
    for e in range(count):
        highest = max(highest, scores[row, e])
    for e in range(count):
        scores[row, e] = sigmoid(scores[row, e]) if is_sigmoid else exp(scores[row, e] - highest)
    if not is_sigmoid:
        total = row_sum(scores[row, :count])
        for e in range(count):
            scores[row, e] /= total


@serial
def _best(values: Array, taken: Array, first: int, end: int) -> int:
    """The index in first .. end of the highest value not taken; among equals the lower."""
    best = -1
    for i in range(first, end):
        if not taken[i] and (best < 0 or values[i] > values[best]):
            best = i
    return best


@serial
def _open_groups(biased: Array, taken: Array, groups: int, kept: int, group_best: int) -> None:
    """Set taken[expert] for every expert outside the `kept` best groups, and clear it for those inside."""
    size = len(biased) // groups
    ranks, open_group = np.zeros(groups, np.float32), np.zeros(groups, np.bool_)
    taken[:] = False
    for g in range(groups):
        for _ in range(group_best):
            e = _best(biased, taken, g * size, (g + 1) * size)
            ranks[g] += biased[e]
            taken[e] = True
    for _ in range(kept):
        open_group[_best(ranks, open_group, 0, groups)] = True
    for e in range(len(biased)):
        taken[e] = not open_group[e // size]


@parallel
def route_rows(
    x: Array, gate: Array, bias: Array, topk: int, groups: int, kept: int, group_best: int, is_sigmoid: bool,
    normalize: bool, scaling: float, chosen: Array, weights: Array,
) -> None:  # fmt: skip
    rows, hidden = x.shape
    experts, lanes = len(bias), gate.shape[0] * LANES
    for task in prange((rows + _CHUNK - 1) // _CHUNK):
        first = task * _CHUNK
        count = min(_CHUNK, rows - first)
        scores, biased = np.empty((_CHUNK, lanes), np.float32), np.empty(experts, np.float32)
        taken = np.empty(experts, np.bool_)
        for p in range(gate.shape[0]):
            panel_product(
                x, first * hidden, hidden, 1, count, gate, p * hidden * LANES, LANES, hidden, scores, p * LANES, lanes
            )
        for i in range(count):
            row, total = first + i, np.float32(1e-20)
            _score(scores, i, experts, is_sigmoid)
            for e in range(experts):
                biased[e] = scores[i, e] + bias[e]
            _open_groups(biased, taken, groups, kept, group_best)
            for k in range(topk):
                best = _best(biased, taken, 0, experts)
                taken[best] = True
                chosen[row, k] = best
                weights[row, k] = scores[i, best]
                total += scores[i, best]
            for k in range(topk):
                weights[row, k] *= np.float32(scaling) / total if normalize else np.float32(scaling)
            for k in range(topk, chosen.shape[1]):
                chosen[row, k], weights[row, k] = experts + k - topk, 1.0
