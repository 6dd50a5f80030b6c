"""Lightning indexer on the CPU: scores every visible index key and keeps the best, the lower index where scores tie."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel, serial
from kernels.cpu.numbers import ordered_bits, rotate
from kernels.cpu.rowtiles import row_tiles
from kernels.cpu.sums import relu_dot
from kernels.cpu.tile import LANES, panel_product
from kernels.operands import IndexerSpec, Pages, Ragged, RopeTable, Selection


def index_topk(
    queries: torch.Tensor, projected: torch.Tensor, spec: IndexerSpec, ragged: Ragged, pages: Pages, rope: RopeTable
) -> Selection:
    """As reference.index.index_topk."""
    rows = queries.shape[0]
    entries = torch.empty(rows, spec.topk, dtype=torch.int32)
    counts = torch.empty(rows, dtype=torch.int32)
    _index(
        queries.numpy(), spec.query_column, projected.numpy(), spec.weight_column, spec.heads, spec.width,
        row_tiles(ragged, spec.heads), ragged.positions, ragged.sequences, ragged.tables, pages.array, pages.offset,
        pages.entries, pages.rate, rope.cos.numpy(), rope.sin.numpy(), entries.numpy(), counts.numpy(),
    )  # fmt: skip
    return Selection(entries, counts)


@serial
def load_heads(
    source: Array, row: int, column: int, heads: int, width: int, cosine: Array, sine: Array, turned: Array,
    panels: Array, lane: int,
) -> None:  # fmt: skip
    """Rotate one row's heads and lay them out as panel columns: panels[lane // 16, channel, lane % 16]."""
    for h in range(heads):
        for c in range(width):
            turned[0, c] = source[row, column + h * width + c]
        rotate(turned, 0, width - 2 * cosine.shape[0], cosine, sine, np.float32(1.0))
        for c in range(width):
            panels[(lane + h) // LANES, c, (lane + h) % LANES] = turned[0, c]


@serial
def _count_from(keys: Array, least: int) -> int:
    """How many keys are at least `least`."""
    count = np.int32(0)
    for i in range(len(keys)):
        count += np.int32(keys[i] >= least)
    return count


@serial
def select_best(scores: Array, count: int, entries: Array) -> int:
    """Indices of the `count` best scores, ascending; among equals the lower index wins. Returns how many."""
    keys = np.empty(len(scores), np.uint32)
    for i in range(len(scores)):
        keys[i] = ordered_bits(scores[i])
    last = np.uint32(0)  # the count-th highest key, found from its top bit down
    for bit in range(31, -1, -1):
        candidate = last | (np.uint32(1) << np.uint32(bit))
        if _count_from(keys, candidate) >= count:
            last = candidate
    room = count - _count_from(keys, last + np.uint32(1)) if last < np.uint32(0xFFFFFFFF) else count
    found = 0
    for i in range(len(keys)):
        if keys[i] > last or (keys[i] == last and room > 0):
            room -= keys[i] == last
            entries[found] = i
            found += 1
    return found


@serial
def _score(
    panels: Array, weights: Array, heads: int, width: int, table: Array, pages: Array, offset: int, per_page: int,
    scores: Array,
) -> None:  # fmt: skip
    """scores[row, e] = sum_h weights[row, h] * relu(q_h . k_e * width**-0.5), page by page, read where they lie."""
    lanes, scale = panels.shape[0] * LANES, np.float32(1.0 / np.sqrt(width))
    products = np.empty((per_page, lanes), np.float32)
    rows, visible = scores.shape
    for first in range(0, visible, per_page):
        count = min(per_page, visible - first)
        at = table[first // per_page] * pages.shape[1] + offset
        for p in range(panels.shape[0]):
            panel_product(
                pages, at, width, 1, count, panels, p * width * LANES, LANES, width, products, p * LANES, lanes
            )
        for r in range(rows):
            for i in range(count):
                scores[r, first + i] = relu_dot(weights[r], products[i, r * heads : (r + 1) * heads]) * scale


@serial
def _choose(
    first: int, rows: int, queries: Array, query_column: int, projected: Array, weight_column: int, heads: int,
    width: int, positions: Array, table: Array, pages: Array, offset: int, per_page: int, rate: int, cosine: Array,
    sine: Array, entries: Array, counts: Array,
) -> None:  # fmt: skip
    """One tile of rows of one sequence, of which the last sees more entries than it may choose."""
    topk, visible = entries.shape[1], (positions[first + rows - 1] + 1) // rate
    panels = np.zeros(((rows * heads + LANES - 1) // LANES, width, LANES), np.float32)
    weights, scores = np.empty((rows, heads), np.float32), np.empty((rows, visible), np.float32)
    turned = np.empty((1, width), np.float32)
    for r in range(rows):
        row, at = first + r, positions[first + r]
        load_heads(queries, row, query_column, heads, width, cosine[at], sine[at], turned, panels, r * heads)
        for h in range(heads):
            weights[r, h] = projected[row, weight_column + h] * np.float32(1.0 / np.sqrt(heads))
    _score(panels, weights, heads, width, table, pages, offset, per_page, scores)
    for r in range(rows):
        own = (positions[first + r] + 1) // rate
        if own > topk:
            counts[first + r] = select_best(scores[r, :own], topk, entries[first + r])


@parallel
def _index(
    queries: Array, query_column: int, projected: Array, weight_column: int, heads: int, width: int, firsts: Array,
    positions: Array, sequences: Array, tables: Array, pages: Array, offset: int, per_page: int, rate: int,
    cosine: Array, sine: Array, entries: Array, counts: Array,
) -> None:  # fmt: skip
    topk = entries.shape[1]
    for tile in prange(len(firsts) - 1):
        first, end = firsts[tile], firsts[tile + 1]
        for row in range(first, end):
            counts[row] = min(topk, (positions[row] + 1) // rate)
            for i in range(counts[row]):
                entries[row, i] = i
        if (positions[end - 1] + 1) // rate > topk:
            _choose(
                first, end - first, queries, query_column, projected, weight_column, heads, width, positions,
                tables[sequences[first]], pages, offset, per_page, rate, cosine, sine, entries, counts,
            )  # fmt: skip
