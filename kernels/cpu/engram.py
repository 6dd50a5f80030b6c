"""Engram's gate on the CPU: one dot product per stream, and the gated value added to it."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel
from kernels.cpu.numbers import inverse_rms, sigmoid
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
        for i in range(streams):
            first = i * hidden
            unit = inverse_rms(x, row, first, hidden, eps)
            key_unit = inverse_rms(projected, row, first, hidden, eps)
            dot = np.float32(0.0)
            for d in range(hidden):
                query = x[row, first + d] * unit * query_norm[i, d]
                dot += query * (projected[row, first + d] * key_unit * key_norm[i, d])
            dot *= np.float32(1.0 / np.sqrt(hidden))
            root = np.sqrt(max(abs(dot), np.float32(1e-6)))
            gate = sigmoid(-root if dot < 0 else root) if alive[row] else np.float32(0.0)
            for d in range(hidden):
                out[row, first + d] = x[row, first + d] + gate * projected[row, streams * hidden + d]
