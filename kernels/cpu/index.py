"""Lightning indexer on the CPU: scores every visible index key and keeps the best, the lower index where scores tie."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel, serial
from kernels.cpu.numbers import ordered_bits, rotate
from kernels.cpu.storage import copy_row
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
        ragged.positions, ragged.sequences, ragged.tables, pages.array, pages.offset, pages.entries, pages.rate,
        rope.cos.numpy(), rope.sin.numpy(), entries.numpy(), counts.numpy(),
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
def _select(scores: Array, count: int, entries: Array) -> int:
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
    panels: Array, weights: Array, width: int, table: Array, pages: Array, offset: int, per_page: int, scores: Array
) -> None:
    """scores[e] = sum_h weights[h] * relu(q_h . k_e * width**-0.5), page by page."""
    lanes, scale = panels.shape[0] * LANES, np.float32(1.0 / np.sqrt(width))
    keys, products = np.empty((per_page, width), np.float32), np.empty((per_page, lanes), np.float32)
    for first in range(0, len(scores), per_page):
        count = min(per_page, len(scores) - first)
        for i in range(count):
            copy_row(pages, table[first // per_page], offset + i * width, width, keys, i)
        for p in range(panels.shape[0]):
            panel_product(keys, 0, width, 1, count, panels, p * width * LANES, LANES, width, products, p * LANES, lanes)
        for i in range(count):
            total = np.float32(0.0)
            for h in range(len(weights)):
                total += weights[h] * max(products[i, h] * scale, np.float32(0.0))
            scores[first + i] = total


@parallel
def _index(
    queries: Array, query_column: int, projected: Array, weight_column: int, heads: int, width: int,
    positions: Array, sequences: Array, tables: Array, pages: Array, offset: int, per_page: int, rate: int,
    cosine: Array, sine: Array, entries: Array, counts: Array,
) -> None:  # fmt: skip
    topk, panel_count = entries.shape[1], (heads + LANES - 1) // LANES
    for row in prange(queries.shape[0]):
        visible = (positions[row] + 1) // rate
        if visible <= topk:
            for i in range(visible):
                entries[row, i] = i
            counts[row] = visible
        else:
            panels = np.zeros((panel_count, width, LANES), np.float32)
            turned = np.empty((1, width), np.float32)
            at = positions[row]
            load_heads(queries, row, query_column, heads, width, cosine[at], sine[at], turned, panels, 0)
            weights, scores = np.empty(heads, np.float32), np.empty(visible, np.float32)
            for h in range(heads):
                weights[h] = projected[row, weight_column + h] * np.float32(1.0 / np.sqrt(heads))
            _score(panels, weights, width, tables[sequences[row]], pages, offset, per_page, scores)
            counts[row] = _select(scores, topk, entries[row])
