"""V4.1's entries on the CPU: latents pooled from the rows of their windows, and finished entries written to pages."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel
from kernels.cpu.numbers import exp, fma, narrow_into
from kernels.cpu.storage import store_rows
from kernels.cpu.sums import inverse_rms
from kernels.csa2 import PoolSpec
from kernels.operands import Pages, Ragged, Ring

_NO_RING = np.zeros((1, 1), np.float32)


def pool(projected: torch.Tensor, spec: PoolSpec, ragged: Ragged, ring: Ring | None) -> torch.Tensor:
    """As reference.csa2.pool."""
    done = ragged.windows[spec.rate]
    latent = torch.empty(len(done.window), spec.width)
    if len(latent):
        _pool(
            projected.numpy(), spec.column, spec.rate, spec.width, spec.norm.numpy(), spec.norm_eps, done.sequence,
            done.window, ragged.starts, ragged.context, ragged.slots, _NO_RING if ring is None else ring.array,
            0 if ring is None else ring.offset, 1 if ring is None else ring.capacity, latent.numpy(),
        )  # fmt: skip
    if ring is not None:
        store_rows(projected, spec.column, ragged, ring)
    return latent


def store_entries(values: torch.Tensor, ragged: Ragged, pages: Pages) -> None:
    """As reference.csa2.store_entries."""
    done = ragged.windows[pages.rate]
    _store(
        values.numpy(), done.sequence, done.window, ragged.tables, pages.array, pages.offset, pages.entries, pages.width
    )


@parallel
def _pool(
    projected: Array, column: int, rate: int, width: int, norm: Array, eps: float, sequences: Array, windows: Array,
    starts: Array, context: Array, slots: Array, ring: Array, offset: int, capacity: int, latent: Array,
) -> None:  # fmt: skip
    gated = 1 if rate > 1 else 0
    for i in prange(len(windows)):
        s, first = sequences[i], windows[i] * rate
        highest, total = np.full(width, -np.inf, np.float32), np.zeros(width, np.float32)
        for c in range(width):
            latent[i, c] = np.float32(0.0)
        for step in range(2):
            for p in range(first, first + rate):
                fresh = p >= context[s]
                row = starts[s] + p - context[s] if fresh else slots[s]
                content = column if fresh else offset + p % capacity * 2 * width
                source = projected if fresh else ring
                for c in range(width):
                    gate = source[row, content + width + c] if gated else np.float32(0.0)
                    if step == 0:
                        highest[c] = max(highest[c], gate)
                    else:
                        weight = exp(gate - highest[c])
                        total[c] += weight
                        latent[i, c] = fma(weight, source[row, content + c], latent[i, c])
        for c in range(width):
            latent[i, c] /= total[c]
        unit = inverse_rms(latent, i, 0, width, eps)
        for c in range(width):
            latent[i, c] = latent[i, c] * unit * norm[c]


@parallel
def _store(
    values: Array, sequences: Array, windows: Array, tables: Array, pages: Array, offset: int, entries: int, width: int
) -> None:
    for i in prange(len(windows)):
        block, base = tables[sequences[i], windows[i] // entries], offset + windows[i] % entries * width
        for c in range(width):
            narrow_into(pages, block, base + c, values[i, c])
