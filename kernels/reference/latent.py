"""Query latent and window key in torch, read from the fused input projection. Knows no cache."""

from __future__ import annotations

import torch

from kernels.operands import LatentSpec, Ragged, RopeTable
from kernels.reference.norm import rotate, unit_rms


def latent(
    projected: torch.Tensor, spec: LatentSpec, ragged: Ragged, rope: RopeTable, kv_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """projected [rows, rank + head_dim + ...] -> query latent [rows, rank] fp32, key [rows, head_dim] kv_dtype."""
    rank, width = spec.query_norm.shape[0], spec.key_norm.shape[0]
    query = unit_rms(projected[:, :rank], spec.norm_eps) * spec.query_norm
    key = unit_rms(projected[:, rank : rank + width], spec.norm_eps) * spec.key_norm
    at = torch.from_numpy(ragged.positions).long()
    return query, rotate(key, rope.cos[at], rope.sin[at]).to(kv_dtype)
