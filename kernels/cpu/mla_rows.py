"""Norms and cached rows of multi-head latent attention on the CPU: one task per token."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel
from kernels.cpu.numbers import rotate
from kernels.cpu.storage import narrow_row
from kernels.cpu.sums import inverse_rms, row_sum
from kernels.operands import IndexKeySpec, MlaSpec, Pages, Ragged, RopeTable


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As reference.norm.norm."""
    out = torch.empty(x.shape)
    norm_rows(x.numpy(), 0, weight.numpy(), eps, out.numpy())
    return out


def store_latent(projected: torch.Tensor, spec: MlaSpec, ragged: Ragged, pages: Pages, rope: RopeTable) -> None:
    """As reference.mla.store_latent."""
    store_latent_rows(
        projected.numpy(), spec.column, spec.norm.numpy(), spec.norm_eps, ragged.positions, ragged.sequences,
        ragged.tables, pages.array, pages.offset, pages.entries, rope.cos.numpy(), rope.sin.numpy(),
    )  # fmt: skip


def store_index_key(projected: torch.Tensor, spec: IndexKeySpec, ragged: Ragged, pages: Pages, rope: RopeTable) -> None:
    """As reference.mla.store_index_key."""
    _store_index_key(
        projected.numpy(), spec.column, spec.norm.numpy(), spec.bias.numpy(), spec.norm_eps, ragged.positions,
        ragged.sequences, ragged.tables, pages.array, pages.offset, pages.entries, rope.cos.numpy(), rope.sin.numpy(),
    )  # fmt: skip


@parallel
def norm_rows(x: Array, column: int, weight: Array, eps: float, out: Array) -> None:
    """out [rows, width] from columns `column .. + width` of x."""
    width = weight.shape[0]
    for row in prange(x.shape[0]):
        unit, source, target = inverse_rms(x, row, column, width, eps), x[row, column : column + width], out[row]
        for c in range(width):
            target[c] = source[c] * unit * weight[c]


@parallel
def store_latent_rows(
    projected: Array, column: int, norm: Array, eps: float, positions: Array, sequences: Array, tables: Array,
    pages: Array, offset: int, per_page: int, cosine: Array, sine: Array,
) -> None:  # fmt: skip
    rank = norm.shape[0]
    width = rank + 2 * cosine.shape[1]
    for row in prange(projected.shape[0]):
        at, made = positions[row], np.empty((1, width), np.float32)
        unit = inverse_rms(projected, row, column, rank, eps)
        source, target = projected[row, column : column + width], made[0]
        for c in range(rank):
            target[c] = source[c] * unit * norm[c]
        for c in range(rank, width):
            target[c] = source[c]
        rotate(made, 0, rank, cosine[at], sine[at], np.float32(1.0))
        narrow_row(made, 0, pages, tables[sequences[row], at // per_page], offset + at % per_page * width)


@parallel
def _store_index_key(
    projected: Array, column: int, norm: Array, bias: Array, eps: float, positions: Array, sequences: Array,
    tables: Array, pages: Array, offset: int, per_page: int, cosine: Array, sine: Array,
) -> None:  # fmt: skip
    width = norm.shape[0]
    for row in prange(projected.shape[0]):
        at, made = positions[row], np.empty((1, width), np.float32)
        mean = row_sum(projected[row, column : column + width]) / np.float32(width)
        for c in range(width):
            made[0, c] = projected[row, column + c] - mean
        unit = inverse_rms(made, 0, 0, width, eps)
        for c in range(width):
            made[0, c] = made[0, c] * unit * norm[c] + bias[c]
        rotate(made, 0, width - 2 * cosine.shape[1], cosine[at], sine[at], np.float32(1.0))
        narrow_row(made, 0, pages, tables[sequences[row], at // per_page], offset + at % per_page * width)
