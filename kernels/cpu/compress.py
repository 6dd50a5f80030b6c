"""Compressor pooling on the CPU: each window this batch completes becomes one entry in its block."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel, serial
from kernels.cpu.numbers import exp, fma, narrow_into, rotate
from kernels.cpu.storage import store_rows
from kernels.cpu.sums import inverse_rms
from kernels.operands import CompressorSpec, Pages, Ragged, Ring, RopeTable


def compress(
    projected: torch.Tensor, spec: CompressorSpec, ragged: Ragged, ring: Ring, pages: Pages, rope: RopeTable
) -> None:
    """As reference.compress.compress."""
    done = ragged.windows[spec.rate]
    if len(done.window):
        _pool(
            projected.numpy(), spec.column, spec.rate, spec.width, 2 if spec.overlap else 1, spec.bias.numpy(),
            spec.norm.numpy(), spec.norm_eps, done.sequence, done.window, ragged.starts, ragged.context, ragged.slots,
            ragged.tables, ring.array, ring.offset, ring.capacity, pages.array, pages.offset, pages.entries,
            rope.cos.numpy(), rope.sin.numpy(),
        )  # fmt: skip
    store_rows(projected, spec.column, ragged, ring)


@serial
def _highest(rows: Array, row: int, gate: int, bias: Array, at: int, part: int, highest: Array) -> None:
    for c in range(highest.shape[0]):
        highest[c] = max(highest[c], rows[row, gate + c] + bias[at, part + c])


@serial
def _accumulate(
    rows: Array, row: int, content: int, gate: int, bias: Array, at: int, part: int, highest: Array, total: Array,
    pooled: Array,
) -> None:  # fmt: skip
    for c in range(highest.shape[0]):
        weight = exp(rows[row, gate + c] + bias[at, part + c] - highest[c])
        total[c] += weight
        pooled[0, c] = fma(weight, rows[row, content + c], pooled[0, c])


@parallel
def _pool(
    projected: Array, column: int, rate: int, width: int, parts: int, bias: Array, norm: Array, eps: float,
    sequences: Array, windows: Array, starts: Array, context: Array, slots: Array, tables: Array,
    ring: Array, offset: int, capacity: int, pages: Array, page_offset: int, entries: int, cosine: Array, sine: Array,
) -> None:  # fmt: skip
    row_width = 2 * parts * width
    for i in prange(len(windows)):
        s, w = sequences[i], windows[i]
        begin, end = max(0, (w + 1 - parts) * rate), (w + 1) * rate
        highest, total = np.full(width, -np.inf, np.float32), np.zeros(width, np.float32)
        pooled = np.zeros((1, width), np.float32)
        for step in range(2):
            for p in range(begin, end):
                # With overlap, the window's own tokens give their second part and the window before it the first.
                part = width if parts == 2 and p >= w * rate else 0
                fresh = p >= context[s]
                row = starts[s] + p - context[s] if fresh else slots[s]
                content = (column if fresh else offset + p % capacity * row_width) + part
                gate = content + parts * width
                source = projected if fresh else ring
                if step == 0:
                    _highest(source, row, gate, bias, p % rate, part, highest)
                else:
                    _accumulate(source, row, content, gate, bias, p % rate, part, highest, total, pooled)
        for c in range(width):
            pooled[0, c] /= total[c]
        unit = inverse_rms(pooled, 0, 0, width, eps)
        for c in range(width):
            pooled[0, c] = pooled[0, c] * unit * norm[c]
        rotate(pooled, 0, width - 2 * cosine.shape[1], cosine[w * rate], sine[w * rate], np.float32(1.0))
        base = page_offset + w % entries * width
        for c in range(width):
            narrow_into(pages, tables[s, w // entries], base + c, pooled[0, c])
