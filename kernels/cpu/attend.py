"""Attention on the CPU: tiles of neighbouring rows share their gathered keys; all heads of a tile are panel columns.

A row's keys are always its window in order, then its entries in order, and every sum runs over them one by one. Keys a
row may not see enter with weight 0, which changes no bit, so tiles do not disturb batch invariance.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel, serial
from kernels.cpu.numbers import exp, rotate
from kernels.cpu.rowtiles import row_tiles
from kernels.cpu.storage import as_array, copy_row
from kernels.cpu.sums import inverse_rms
from kernels.cpu.tile import LANES, panel_product
from kernels.operands import AttentionSpec, Pages, Ragged, Ring, RopeTable, Selection

_NO_PAGES = np.zeros((0, 0), np.float32)
_NO_PAGES_BF16 = np.zeros((0, 0), np.uint16)
_NO_COUNTS = np.zeros(0, np.int32)
_NO_ENTRIES = np.zeros((0, 0), np.int32)
_UNNORMED = -1.0


def attend(
    queries: torch.Tensor, fresh: torch.Tensor, spec: AttentionSpec, ragged: Ragged, ring: Ring,
    pages: Pages | None, selection: Selection | None, rope: RopeTable,
) -> torch.Tensor:  # fmt: skip
    """As reference.attend.attend."""
    out = torch.empty(queries.shape[0], spec.heads * spec.width)
    keys = as_array(fresh)
    no_pages = _NO_PAGES if keys.dtype == np.float32 else _NO_PAGES_BF16
    _attend(
        queries.numpy(), keys, spec.heads, spec.width, spec.window, spec.sink.numpy(),
        _UNNORMED if spec.norm_eps is None else spec.norm_eps,
        row_tiles(ragged, spec.heads),
        ragged.positions, ragged.sequences, ragged.starts, ragged.context, ragged.slots, ragged.tables,
        ring.array, ring.offset, ring.capacity, ragged.window_floors,
        no_pages if pages is None else pages.array, 0 if pages is None else pages.offset,
        1 if pages is None else pages.entries, 0 if pages is None else pages.rate,
        _NO_ENTRIES if selection is None else selection.entries.numpy(),
        _NO_COUNTS if selection is None else selection.counts.numpy(),
        rope.cos.numpy(), rope.sin.numpy(), out.numpy(),
    )  # fmt: skip
    return out


@serial
def _load_queries(
    queries: Array, first: int, rows: int, heads: int, width: int, eps: float, positions: Array, cosine: Array,
    sine: Array, panels: Array,
) -> None:  # fmt: skip
    """Normalise (unless `eps` is negative), rotate and scale each head: column `row * heads + head` of the panels."""
    turned, scale = np.empty((1, width), np.float32), np.float32(1.0 / np.sqrt(width))
    for i in range(rows):
        at = positions[first + i]
        for h in range(heads):
            unit = inverse_rms(queries, first + i, h * width, width, eps) if eps >= 0 else np.float32(1.0)
            for c in range(width):
                turned[0, c] = queries[first + i, h * width + c] * unit
            rotate(turned, 0, width - 2 * cosine.shape[1], cosine[at], sine[at], np.float32(1.0))
            lane = i * heads + h
            for c in range(width):
                panels[lane // LANES, c, lane % LANES] = turned[0, c] * scale


@serial
def _hide(scores: Array, seen: Array, dense: int, heads: int) -> None:
    """Scores [keys, lanes] become -inf but for seen[row] = (first, end) of the dense keys and (end) of the others."""
    for row in range(seen.shape[0]):
        for lane in range(row * heads, (row + 1) * heads):
            for k in range(seen[row, 0]):
                scores[k, lane] = -np.inf
            for k in range(seen[row, 1], dense):
                scores[k, lane] = -np.inf
            for k in range(dense + seen[row, 2], scores.shape[0]):
                scores[k, lane] = -np.inf


@serial
def _weigh(scores: Array, lanes: int, heads: int, sink: Array, inverse: Array) -> None:
    """scores [keys, >= lanes] -> exp(score - max); inverse [lanes] of their sums with the sink's share."""
    keys = scores.shape[0]
    highest, total = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    for lane in range(lanes):
        highest[lane] = sink[lane % heads]
    for k in range(keys):
        for lane in range(lanes):
            highest[lane] = max(highest[lane], scores[k, lane])
    for lane in range(lanes):
        total[lane] = exp(sink[lane % heads] - highest[lane])
    for k in range(keys):
        for lane in range(lanes):
            weight = exp(scores[k, lane] - highest[lane])
            scores[k, lane] = weight
            total[lane] += weight
    for lane in range(lanes):
        inverse[lane] = np.float32(1.0) / total[lane]


@serial
def _mix(
    scores: Array, keys: Array, count: int, rows: int, heads: int, width: int, inverse: Array, first: int,
    positions: Array, cosine: Array, sine: Array, out: Array,
) -> None:  # fmt: skip
    """out[row, head] = weighted keys, divided, and rotated back by the query's own angle."""
    lanes, padded = scores.shape[1], keys.shape[1]
    mixed = np.empty((rows * heads, padded), np.float32)
    for c in range(0, padded, LANES):
        panel_product(scores, 0, 1, lanes, rows * heads, keys, c, padded, count, mixed, c, padded)
    for lane in range(rows * heads):
        row, head = first + lane // heads, lane % heads
        for c in range(width):
            mixed[lane, c] *= inverse[lane]
        rotate(mixed, lane, width - 2 * cosine.shape[1], cosine[positions[row]], sine[positions[row]], np.float32(-1.0))
        for c in range(width):
            out[row, head * width + c] = mixed[lane, c]


@serial
def _attend_tile(
    first: int, rows: int, queries: Array, fresh: Array, heads: int, width: int, window: int, sink: Array, eps: float,
    positions: Array, start: int, context: int, slot: int, table: Array, ring: Array, offset: int, capacity: int,
    floor: int, pages: Array, page_offset: int, per_page: int, rate: int, entries: Array, counts: Array, cosine: Array,
    sine: Array, out: Array,
) -> None:  # fmt: skip
    """One tile: gather keys, score, weigh, mix. With a selection that drops entries, `rows` is 1."""
    padded = (width + LANES - 1) // LANES * LANES
    panel_count = (rows * heads + LANES - 1) // LANES
    last = first + rows - 1
    begin = max(floor, positions[first] - window + 1)
    dense = positions[last] + 1 - begin
    visible = (positions[last] + 1) // rate if rate > 0 else 0
    sparse = counts[last] if len(counts) > 0 else visible
    keys = np.empty((dense + sparse, padded), np.float32)
    keys[:, width:] = 0.0
    for i in range(dense):
        p = begin + i
        if p >= context:
            copy_row(fresh, start + p - context, 0, width, keys, i)
        else:
            copy_row(ring, slot, offset + p % capacity * width, width, keys, i)
    for i in range(sparse):
        e = entries[last, i] if sparse < visible else i
        copy_row(pages, table[e // per_page], page_offset + e % per_page * width, width, keys, dense + i)
    panels = np.zeros((panel_count, width, LANES), np.float32)
    _load_queries(queries, first, rows, heads, width, eps, positions, cosine, sine, panels)
    lanes = panel_count * LANES
    scores = np.empty((dense + sparse, lanes), np.float32)
    for p in range(panel_count):
        panel_product(
            keys, 0, padded, 1, dense + sparse, panels, p * width * LANES, LANES, width, scores, p * LANES, lanes
        )
    seen = np.empty((rows, 3), np.int32)
    for i in range(rows):
        at = positions[first + i]
        seen[i, 0] = max(floor, at - window + 1) - begin
        seen[i, 1] = at + 1 - begin
        seen[i, 2] = sparse if sparse < visible or rate == 0 else (at + 1) // rate
    if rows > 1:
        _hide(scores, seen, dense, heads)
    inverse = np.empty(rows * heads, np.float32)
    _weigh(scores, rows * heads, heads, sink, inverse)
    _mix(scores, keys, dense + sparse, rows, heads, width, inverse, first, positions, cosine, sine, out)


@parallel
def _attend(
    queries: Array, fresh: Array, heads: int, width: int, window: int, sink: Array, eps: float, firsts: Array,
    positions: Array, sequences: Array, starts: Array, context: Array, slots: Array, tables: Array,
    ring: Array, offset: int, capacity: int, floors: Array, pages: Array, page_offset: int, per_page: int, rate: int,
    entries: Array, counts: Array, cosine: Array, sine: Array, out: Array,
) -> None:  # fmt: skip
    for tile in prange(len(firsts) - 1):
        first, end = firsts[tile], firsts[tile + 1]
        s = sequences[first]
        # Rows whose selections differ cannot share keys.
        chosen = len(counts) > 0 and counts[end - 1] < (positions[end - 1] + 1) // rate
        step = 1 if chosen else end - first
        for row in range(first, end, step):
            _attend_tile(
                row, step, queries, fresh, heads, width, window, sink, eps, positions, starts[s], context[s], slots[s],
                tables[s], ring, offset, capacity, floors[s], pages, page_offset, per_page, rate, entries, counts,
                cosine, sine, out,
            )  # fmt: skip
