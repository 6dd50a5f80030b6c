"""Heads turned to their row's position on the CPU: one pass over the rows, from the projection to what is scored."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel
from kernels.cpu.numbers import rotate
from kernels.operands import RopeTable


def rotate_heads(x: torch.Tensor, width: int, positions: np.ndarray, rope: RopeTable) -> torch.Tensor:
    """As reference.csa2.rotate_heads."""
    out = torch.empty(x.shape)
    _rotate(x.numpy(), width, positions, rope.cos.numpy(), rope.sin.numpy(), out.numpy())
    return out


@parallel
def _rotate(x: Array, width: int, positions: Array, cosine: Array, sine: Array, out: Array) -> None:
    for row in prange(x.shape[0]):
        at = positions[row]
        for c in range(x.shape[1]):
            out[row, c] = x[row, c]
        for first in range(0, x.shape[1], width):
            rotate(out, row, first + width - 2 * cosine.shape[1], cosine[at], sine[at], np.float32(1.0))
