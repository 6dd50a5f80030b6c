"""V4.1's choice of entries on the CPU: row by row, within the candidate blocks where there are any.

A row's bits depend on the row alone: whether it is scored at all, and over which entries, is decided for each row.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel, serial
from kernels.cpu.index import select_best
from kernels.cpu.sums import relu_dot
from kernels.cpu.tile import LANES, panel_product
from kernels.csa2 import ChoiceSpec
from kernels.operands import Pages, Ragged, Selection

_NO_ENTRIES, _NO_COUNTS = np.zeros((0, 0), np.int32), np.zeros(0, np.int32)


def choose(
    queries: torch.Tensor, weights: torch.Tensor, spec: ChoiceSpec, ragged: Ragged, pages: Pages,
    candidates: Selection | None,
) -> tuple[Selection, Selection | None]:  # fmt: skip
    """As reference.csa2.choose."""
    rows = len(queries)
    chosen, proposed = _empty(rows, spec.topk), _empty(rows, spec.blocks)
    _choose(
        queries.numpy(), weights.numpy(), spec.heads, spec.width, spec.block_entries, ragged.positions,
        ragged.sequences, ragged.tables, pages.array, pages.offset, pages.entries, pages.rate,
        _NO_ENTRIES if candidates is None else candidates.entries.numpy(),
        _NO_COUNTS if candidates is None else candidates.counts.numpy(),
        chosen.entries.numpy(), chosen.counts.numpy(), proposed.entries.numpy(), proposed.counts.numpy(),
    )  # fmt: skip
    return chosen, proposed if spec.blocks else None


def _empty(rows: int, most: int) -> Selection:
    return Selection(torch.empty(rows, most, dtype=torch.int32), torch.empty(rows, dtype=torch.int32))


@serial
def _panels(queries: Array, row: int, heads: int, width: int) -> Array:
    """The row's heads as panel columns."""
    panels = np.zeros(((heads + LANES - 1) // LANES, width, LANES), np.float32)
    for h in range(heads):
        for c in range(width):
            panels[h // LANES, c, h % LANES] = queries[row, h * width + c]
    return panels


@serial
def _score_run(
    panels: Array, weights: Array, row: int, heads: int, width: int, pages: Array, at: int, count: int, products: Array,
    scores: Array, first: int,
) -> None:  # fmt: skip
    """Scores of `count` keys that lie one after another from element `at` of the pages."""
    lanes, scale = panels.shape[0] * LANES, np.float32(1.0 / np.sqrt(width * heads))
    for p in range(panels.shape[0]):
        panel_product(pages, at, width, 1, count, panels, p * width * LANES, LANES, width, products, p * LANES, lanes)
    for i in range(count):
        scores[first + i] = relu_dot(weights[row], products[i, :heads]) * scale


@serial
def _allowed(visible: int, blocks: Array, block_entries: int) -> Array:
    """Visible entries of the blocks, ascending."""
    found = np.empty(len(blocks) * block_entries, np.int32)
    count = 0
    for b in range(len(blocks)):
        for e in range(blocks[b] * block_entries, min((blocks[b] + 1) * block_entries, visible)):
            found[count] = e
            count += 1
    return found[:count]


@serial
def _score(
    panels: Array, weights: Array, row: int, heads: int, width: int, table: Array, pages: Array, offset: int,
    per_page: int, allowed: Array, scores: Array,
) -> None:  # fmt: skip
    """Scores of the allowed entries, in runs of neighbours within a page."""
    products = np.empty((per_page, panels.shape[0] * LANES), np.float32)
    i = 0
    while i < len(allowed):
        e, count = allowed[i], 1
        most = per_page - e % per_page
        while count < most and i + count < len(allowed) and allowed[i + count] == e + count:
            count += 1
        at = table[e // per_page] * pages.shape[1] + offset + e % per_page * width
        _score_run(panels, weights, row, heads, width, pages, at, count, products, scores, i)
        i += count


@serial
def _propose(scores: Array, block_entries: int, most: int, blocks: Array) -> int:
    """The best blocks by their best entry; the newest entry's block always counts as best. Returns how many."""
    count = (len(scores) + block_entries - 1) // block_entries
    best = np.full(count, -np.inf, np.float32)
    for e in range(len(scores)):
        best[e // block_entries] = max(best[e // block_entries], scores[e])
    best[count - 1] = np.inf
    return select_best(best, min(most, count), blocks)


@parallel
def _choose(
    queries: Array, weights: Array, heads: int, width: int, block_entries: int, positions: Array, sequences: Array,
    tables: Array, pages: Array, offset: int, per_page: int, rate: int, candidates: Array, candidate_counts: Array,
    entries: Array, counts: Array, blocks: Array, block_counts: Array,
) -> None:  # fmt: skip
    topk, most = entries.shape[1], blocks.shape[1]
    for row in prange(len(queries)):
        visible = (positions[row] + 1) // rate
        block_count = (visible + block_entries - 1) // block_entries
        if len(candidate_counts) > 0 and candidate_counts[row] < block_count:
            allowed = _allowed(visible, candidates[row, : candidate_counts[row]], block_entries)
        else:
            allowed = np.arange(visible).astype(np.int32)
        counts[row], block_counts[row] = min(topk, len(allowed)), min(most, block_count)
        entries[row, : counts[row]] = allowed[: counts[row]]
        blocks[row, : block_counts[row]] = np.arange(block_counts[row])
        if len(allowed) > topk or (most > 0 and block_count > most):
            scores = np.empty(len(allowed), np.float32)
            panels = _panels(queries, row, heads, width)
            _score(panels, weights, row, heads, width, tables[sequences[row]], pages, offset, per_page, allowed, scores)
            if len(allowed) > topk:
                select_best(scores, topk, entries[row])
                for i in range(topk):
                    entries[row, i] = allowed[entries[row, i]]
            if most > 0 and block_count > most:
                _propose(scores, block_entries, most, blocks[row])
