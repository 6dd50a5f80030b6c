"""Expert choice on the CPU: gate product, scores and top-k in one pass; the lower expert wins a tie."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel
from kernels.cpu.linear import rounded
from kernels.cpu.numbers import exp
from kernels.cpu.tile import LANES, panel_product
from kernels.operands import RouterSpec

_CHUNK = 12
_NO_TABLE = np.zeros((0, 0), np.int64)
_NO_BIAS = np.zeros(0, np.float32)


def route(x: torch.Tensor, tokens: torch.Tensor, spec: RouterSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """As reference.route.route."""
    rows = x.shape[0]
    chosen, weights = torch.empty(rows, spec.topk, dtype=torch.int32), torch.empty(rows, spec.topk)
    source = rounded(x) if spec.gate.rounds else x
    _route(
        source.numpy(), tokens.numpy(), spec.gate.array, spec.experts,
        _NO_BIAS if spec.bias is None else spec.bias.numpy(), _NO_TABLE if spec.table is None else spec.table.numpy(),
        spec.scaling, chosen.numpy(), weights.numpy(),
    )  # fmt: skip
    return chosen, weights


@parallel
def _route(
    x: Array, tokens: Array, gate: Array, experts: int, bias: Array, table: Array, scaling: float, chosen: Array,
    weights: Array,
) -> None:  # fmt: skip
    rows, hidden = x.shape
    topk, lanes = chosen.shape[1], gate.shape[0] * LANES
    for task in prange((rows + _CHUNK - 1) // _CHUNK):
        first = task * _CHUNK
        count = min(_CHUNK, rows - first)
        scores = np.empty((_CHUNK, lanes), np.float32)
        taken = np.empty(experts, np.bool_)
        for p in range(gate.shape[0]):
            panel_product(
                x, first * hidden, hidden, 1, count, gate, p * hidden * LANES, LANES, hidden, scores, p * LANES, lanes
            )
        for i in range(count):
            row = first + i
            for e in range(experts):
                z = scores[i, e]
                scores[i, e] = np.sqrt(max(z, np.float32(0.0)) + np.log1p(exp(-abs(z))))
                taken[e] = False
            total = np.float32(1e-20)
            for k in range(topk):
                if len(table) > 0:
                    best = table[tokens[row], k]
                else:
                    best = -1
                    for e in range(experts):
                        if not taken[e] and (best < 0 or scores[i, e] + bias[e] > scores[i, best] + bias[best]):
                            best = e
                    taken[best] = True
                chosen[row, k] = best
                weights[row, k] = scores[i, best]
                total += scores[i, best]
            for k in range(topk):
                weights[row, k] = weights[row, k] / total * np.float32(scaling)
