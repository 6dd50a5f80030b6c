"""Absorbed latent attention on the CPU: one task per row and four heads, over the cached rows where they lie.

A row's keys stand in the order of their positions; what a task computes depends on its own row and heads alone, which
is all that batch invariance asks.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel, serial
from kernels.cpu.headtile import HEADS, mix_values, score_keys
from kernels.cpu.numbers import exp, rotate
from kernels.operands import MlaSpec, Pages, Ragged, RopeTable, Selection

NO_COUNTS = np.zeros(0, np.int32)
NO_ENTRIES = np.zeros((0, 0), np.int32)
_NEAR = 64  # keys whose values are mixed while the caches still hold them


def attend_latent(
    absorbed: torch.Tensor, turning: torch.Tensor, spec: MlaSpec, ragged: Ragged, pages: Pages,
    selection: Selection | None, rope: RopeTable,
) -> torch.Tensor:  # fmt: skip
    """As reference.mla.attend_latent."""
    out = torch.empty(absorbed.shape[0], spec.heads * spec.rank)
    attend(
        absorbed.numpy(), turning.numpy(), 0, spec.heads, spec.rank, spec.scale, ragged.positions, ragged.sequences,
        ragged.tables, pages.array, pages.offset, pages.entries,
        NO_ENTRIES if selection is None else selection.entries.numpy(),
        NO_COUNTS if selection is None else selection.counts.numpy(),
        rope.cos.numpy(), rope.sin.numpy(), out.numpy(),
    )  # fmt: skip
    return out


@serial
def _load_queries(
    absorbed: Array, turning: Array, column: int, row: int, first: int, heads: int, rank: int, scale: float,
    cosine: Array, sine: Array, queries: Array,
) -> None:  # fmt: skip
    """Rotate and scale heads first .. + heads of one row into queries [4, rank + rope]."""
    rope, factor = 2 * len(cosine), np.float32(scale)
    for h in range(heads):
        at, turn, query = (first + h) * rank, column + (first + h) * rope, queries[h]
        still, turned = absorbed[row, at : at + rank], turning[row, turn : turn + rope]
        for c in range(rank):
            query[c] = still[c] * factor
        for c in range(rope):
            query[rank + c] = turned[c]
        rotate(queries, h, rank, cosine, sine, np.float32(1.0))
        for c in range(rope):
            query[rank + c] *= factor


@serial
def _place_keys(
    table: Array, stride: int, offset: int, per_page: int, width: int, chosen: Array, places: Array
) -> None:
    """Where the rows of positions `chosen`, or of all up to the last, begin in the flat pages."""
    if len(chosen) > 0:
        for i in range(len(places)):
            places[i] = table[chosen[i] // per_page] * stride + offset + chosen[i] % per_page * width
        return
    for first in range(0, len(places), per_page):
        base = table[first // per_page] * stride + offset
        for i in range(min(per_page, len(places) - first)):
            places[first + i] = base + i * width


@serial
def _weigh(scores: Array, inverse: Array) -> None:
    """scores [keys, 4] -> exp(score - max); inverse [4] of their sums."""
    highest, total = np.full(HEADS, -np.inf, np.float32), np.zeros(HEADS, np.float32)
    for k in range(scores.shape[0]):
        for h in range(HEADS):
            highest[h] = max(highest[h], scores[k, h])
    for k in range(scores.shape[0]):
        for h in range(HEADS):
            scores[k, h] -= highest[h]
    flat = scores.reshape(-1)
    for i in range(len(flat)):
        flat[i] = exp(flat[i])
    for k in range(scores.shape[0]):
        for h in range(HEADS):
            total[h] += scores[k, h]
    for h in range(HEADS):
        inverse[h] = np.float32(1.0) / total[h]


@parallel
def attend(
    absorbed: Array, turning: Array, column: int, heads: int, rank: int, scale: float, positions: Array,
    sequences: Array, tables: Array, pages: Array, offset: int, per_page: int, entries: Array, counts: Array,
    cosine: Array, sine: Array, out: Array,
) -> None:  # fmt: skip
    """out [rows, heads * rank]; the rotary channels of the queries are columns `column ..` of `turning`."""
    width, stored, fours = rank + 2 * cosine.shape[1], pages.reshape(-1), (heads + HEADS - 1) // HEADS
    for task in prange(absorbed.shape[0] * fours):
        row, first = task // fours, task % fours * HEADS
        at, few, mine = positions[row], min(HEADS, heads - first), tables[sequences[row]]
        count = at + 1
        chosen = mine[:0]
        if len(counts) > 0 and counts[row] < count:
            count = counts[row]
            chosen = entries[row, :count]
        places, scores = np.empty(count, np.int64), np.empty((count, HEADS), np.float32)
        _place_keys(mine, pages.shape[1], offset, per_page, width, chosen, places)
        queries, mixed = np.zeros((HEADS, width), np.float32), np.zeros((HEADS, rank), np.float32)
        _load_queries(absorbed, turning, column, row, first, few, rank, scale, cosine[at], sine[at], queries)
        score_keys(queries, stored, places, width, scores)
        inverse = np.empty(HEADS, np.float32)
        _weigh(scores, inverse)
        for near in range(0, count, _NEAR):
            mix_values(scores, stored, places, near, min(_NEAR, count - near), rank, mixed)
        for h in range(few):
            for c in range(rank):
                out[row, (first + h) * rank + c] = mixed[h, c] * inverse[h]
