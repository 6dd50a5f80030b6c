"""Query latent and window key on the CPU: two norms and one rope per row, read from the fused projection."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel
from kernels.cpu.numbers import narrow_into, rotate
from kernels.cpu.storage import as_array
from kernels.cpu.sums import inverse_rms
from kernels.operands import LatentSpec, Ragged, RopeTable


def latent(
    projected: torch.Tensor, spec: LatentSpec, ragged: Ragged, rope: RopeTable, kv_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """As reference.latent.latent."""
    rows = projected.shape[0]
    query = torch.empty(rows, spec.query_norm.shape[0])
    key = torch.empty(rows, spec.key_norm.shape[0], dtype=kv_dtype)
    _latent(
        projected.numpy(), spec.query_norm.numpy(), spec.key_norm.numpy(), spec.norm_eps, ragged.positions,
        rope.cos.numpy(), rope.sin.numpy(), query.numpy(), as_array(key),
    )  # fmt: skip
    return query, key


@parallel
def _latent(
    projected: Array, query_norm: Array, key_norm: Array, eps: float, positions: Array, cosine: Array, sine: Array,
    query: Array, key: Array,
) -> None:  # fmt: skip
    rank, width = query_norm.shape[0], key_norm.shape[0]
    for row in prange(projected.shape[0]):
        unit = inverse_rms(projected, row, 0, rank, eps)
        for c in range(rank):
            query[row, c] = projected[row, c] * unit * query_norm[c]
        unit = inverse_rms(projected, row, rank, width, eps)
        turned = np.empty((1, width), np.float32)
        for c in range(width):
            turned[0, c] = projected[row, rank + c] * unit * key_norm[c]
        at = positions[row]
        rotate(turned, 0, width - 2 * cosine.shape[1], cosine[at], sine[at], np.float32(1.0))
        for c in range(width):
            narrow_into(key, row, c, turned[0, c])
