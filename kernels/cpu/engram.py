"""Engram's gate on the CPU: one dot product per stream, and the gated value added to it."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel
from kernels.cpu.numbers import fma, sigmoid
from kernels.cpu.sums import dot, inverse_rms
from kernels.csa2 import EngramSpec


def engram(x: torch.Tensor, projected: torch.Tensor, alive: torch.Tensor, spec: EngramSpec) -> torch.Tensor:
    """As reference.csa2.engram."""
    out = torch.empty_like(x)
    rows = len(x)
    _engram(
        x.view(rows, -1).numpy(), projected.numpy(), alive.numpy(), spec.query_norm.numpy(), spec.key_norm.numpy(),
        spec.norm_eps, out.view(rows, -1).numpy(),
    )  # fmt: skip
    return out


@parallel
def _engram(
    x: Array, projected: Array, alive: Array, query_norm: Array, key_norm: Array, eps: float, out: Array
) -> None:
    streams, hidden = query_norm.shape
    for row in prange(len(x)):
        query, key = np.empty(hidden, np.float32), np.empty(hidden, np.float32)
        for i in range(streams):
            first = i * hidden
            unit = inverse_rms(x, row, first, hidden, eps)
            key_unit = inverse_rms(projected, row, first, hidden, eps)
            for d in range(hidden):
                query[d] = x[row, first + d] * unit * query_norm[i, d]
                key[d] = projected[row, first + d] * key_unit * key_norm[i, d]
            score = dot(query, key) * np.float32(1.0 / np.sqrt(hidden))
            root = np.sqrt(max(abs(score), np.float32(1e-6)))
            gate = sigmoid(-root if score < 0 else root) if alive[row] else np.float32(0.0)
            for d in range(hidden):
                out[row, first + d] = fma(gate, projected[row, streams * hidden + d], x[row, first + d])
