"""Absorbed latent attention on the CPU: tiles of neighbouring rows share their gathered keys, which are the values too.

A row's keys stand in the order of their positions and every sum runs over them one by one. Keys a row may not see
enter with weight 0, which changes no bit, so tiles do not disturb batch invariance.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel_ordered, serial_ordered
from kernels.cpu.numbers import exp, rotate
from kernels.cpu.rowtiles import row_tiles
from kernels.cpu.storage import copy_row
from kernels.cpu.tile import LANES, panel_product
from kernels.operands import MlaSpec, Pages, Ragged, RopeTable, Selection

_NO_COUNTS = np.zeros(0, np.int32)
_NO_ENTRIES = np.zeros((0, 0), np.int32)


def attend_latent(
    absorbed: torch.Tensor, turning: torch.Tensor, spec: MlaSpec, ragged: Ragged, pages: Pages,
    selection: Selection | None, rope: RopeTable,
) -> torch.Tensor:  # fmt: skip
    """As reference.mla.attend_latent."""
    out = torch.empty(absorbed.shape[0], spec.heads * spec.rank)
    _attend(
        absorbed.numpy(), turning.numpy(), spec.heads, spec.rank, spec.scale, row_tiles(ragged, spec.heads),
        ragged.positions, ragged.sequences, ragged.tables, pages.array, pages.offset, pages.entries,
        _NO_ENTRIES if selection is None else selection.entries.numpy(),
        _NO_COUNTS if selection is None else selection.counts.numpy(),
        rope.cos.numpy(), rope.sin.numpy(), out.numpy(),
    )  # fmt: skip
    return out


@serial_ordered
def _load_queries(
    absorbed: Array, turning: Array, first: int, rows: int, heads: int, rank: int, scale: float, positions: Array,
    cosine: Array, sine: Array, panels: Array,
) -> None:  # fmt: skip
    """Rotate and scale each head, as column `row * heads + head` of the panels."""
    rope, factor = 2 * cosine.shape[1], np.float32(scale)
    turned = np.empty((1, rope), np.float32)
    for i in range(rows):
        at = positions[first + i]
        for h in range(heads):
            panel, lane = (i * heads + h) // LANES, (i * heads + h) % LANES
            for c in range(rank):
                panels[panel, c, lane] = absorbed[first + i, h * rank + c] * factor
            for c in range(rope):
                turned[0, c] = turning[first + i, h * rope + c]
            rotate(turned, 0, 0, cosine[at], sine[at], np.float32(1.0))
            for c in range(rope):
                panels[panel, rank + c, lane] = turned[0, c] * factor


@serial_ordered
def _weigh(scores: Array, lanes: int, heads: int, seen: Array, inverse: Array) -> None:
    """scores [keys, >= lanes] -> exp(score - max), 0 beyond the first seen[row] keys; inverse [lanes] of the sums."""
    highest, total = np.full(lanes, -np.inf, np.float32), np.zeros(lanes, np.float32)
    for k in range(scores.shape[0]):
        for lane in range(lanes):
            if k >= seen[lane // heads]:
                scores[k, lane] = -np.inf
            highest[lane] = max(highest[lane], scores[k, lane])
    for k in range(scores.shape[0]):
        for lane in range(lanes):
            weight = exp(scores[k, lane] - highest[lane])
            scores[k, lane] = weight
            total[lane] += weight
    for lane in range(lanes):
        inverse[lane] = np.float32(1.0) / total[lane]


@serial_ordered
def _attend_tile(
    first: int, rows: int, absorbed: Array, turning: Array, heads: int, rank: int, scale: float, positions: Array,
    table: Array, pages: Array, offset: int, per_page: int, entries: Array, counts: Array, cosine: Array, sine: Array,
    out: Array,
) -> None:  # fmt: skip
    """One tile: gather keys, score, weigh, mix. With a selection that drops keys, `rows` is 1."""
    width = rank + 2 * cosine.shape[1]
    padded = (width + LANES - 1) // LANES * LANES
    last = first + rows - 1
    visible = positions[last] + 1
    count = counts[last] if len(counts) > 0 else visible
    keys = np.empty((count, padded), np.float32)
    keys[:, width:] = 0.0
    for i in range(count):
        e = entries[last, i] if count < visible else i
        copy_row(pages, table[e // per_page], offset + e % per_page * width, width, keys, i)
    panel_count = (rows * heads + LANES - 1) // LANES
    lanes = panel_count * LANES
    panels, scores = np.zeros((panel_count, width, LANES), np.float32), np.empty((count, lanes), np.float32)
    _load_queries(absorbed, turning, first, rows, heads, rank, scale, positions, cosine, sine, panels)
    for p in range(panel_count):
        panel_product(keys, 0, padded, 1, count, panels, p * width * LANES, LANES, width, scores, p * LANES, lanes)
    seen, inverse = np.empty(rows, np.int64), np.empty(rows * heads, np.float32)
    for i in range(rows):
        seen[i] = count if count < visible else positions[first + i] + 1
    _weigh(scores, rows * heads, heads, seen, inverse)
    mixed = np.empty((rows * heads, padded), np.float32)
    for c in range(0, rank, LANES):
        panel_product(scores, 0, 1, lanes, rows * heads, keys, c, padded, count, mixed, c, padded)
    for lane in range(rows * heads):
        for c in range(rank):
            out[first + lane // heads, lane % heads * rank + c] = mixed[lane, c] * inverse[lane]


@parallel_ordered
def _attend(
    absorbed: Array, turning: Array, heads: int, rank: int, scale: float, firsts: Array, positions: Array,
    sequences: Array, tables: Array, pages: Array, offset: int, per_page: int, entries: Array, counts: Array,
    cosine: Array, sine: Array, out: Array,
) -> None:  # fmt: skip
    for tile in prange(len(firsts) - 1):
        first, end = firsts[tile], firsts[tile + 1]
        # Rows whose selections differ cannot share keys.
        chosen = len(counts) > 0 and counts[end - 1] < positions[end - 1] + 1
        step = 1 if chosen else end - first
        for row in range(first, end, step):
            _attend_tile(
                row, step, absorbed, turning, heads, rank, scale, positions, tables[sequences[first]], pages, offset,
                per_page, entries, counts, cosine, sine, out,
            )  # fmt: skip
