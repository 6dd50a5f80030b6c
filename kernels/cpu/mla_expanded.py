"""Un-absorbed latent attention of one sequence on the CPU: one task per head, whose keys and values it packs itself."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel, serial
from kernels.cpu.numbers import exp, rotate
from kernels.cpu.sums import row_sum
from kernels.cpu.tile import LANES, panel_product
from kernels.operands import MlaSpec, RopeTable

_ROWS = 12  # whose scores are held at once: two register tiles
_ALL = np.zeros((0, 0), np.bool_)


def attend_expanded(
    queries: torch.Tensor, expanded: torch.Tensor, turned: torch.Tensor, spec: MlaSpec, positions: range,
    chosen: torch.Tensor | None, rope: RopeTable,
) -> torch.Tensor:  # fmt: skip
    """As reference.mla.attend_expanded."""
    out = torch.empty(queries.shape[0], spec.heads * spec.value)
    _attend(
        queries.contiguous().numpy(), expanded.numpy(), turned.contiguous().numpy(), spec.heads, spec.nope, spec.value,
        spec.scale, positions.start, _ALL if chosen is None else chosen.numpy(), rope.cos.numpy(), rope.sin.numpy(),
        out.numpy(),
    )  # fmt: skip
    return out


@serial
def _pack(expanded: Array, turned: Array, first: int, nope: int, keys: Array, values: Array) -> None:
    """Columns `first ..` of every expanded row as panels: keys [panels, nope + rope, 16], values [panels, keys, 16]."""
    keys[-1] = 0.0
    for k in range(expanded.shape[0]):
        panel, lane, row, turn = k // LANES, k % LANES, expanded[k, first:], turned[k]
        for c in range(nope):
            keys[panel, c, lane] = row[c]
        for c in range(len(turn)):
            keys[panel, nope + c, lane] = turn[c]
    for p in range(len(values)):
        at = first + nope + p * LANES
        for k in range(expanded.shape[0]):
            source, target = expanded[k, at : at + LANES], values[p, k]
            for lane in range(len(source)):
                target[lane] = source[lane]


@serial
def _load_query(
    queries: Array, row: int, head: int, heads: int, nope: int, scale: float, cosine: Array, sine: Array, target: Array,
    at: int,
) -> None:  # fmt: skip
    """Rotate and scale one head of one row into target[at]."""
    rope, factor, out = 2 * len(cosine), np.float32(scale), target[at]
    still, turning = queries[row, head * nope :], queries[row, heads * nope + head * rope :]
    for c in range(nope):
        out[c] = still[c] * factor
    for c in range(rope):
        out[nope + c] = turning[c] * factor
    rotate(target, at, nope, cosine, sine, np.float32(1.0))


@serial
def _weigh(scores: Array, seen: int, chosen: Array) -> float:
    """scores -> exp(score - max) for the first `seen` keys that are chosen, 0 for all others; 1 / their sum."""
    for k in range(len(chosen)):
        if not chosen[k]:
            scores[k] = -np.inf
    highest = np.float32(-np.inf)
    for k in range(seen):
        highest = max(highest, scores[k])
    for k in range(seen):
        scores[k] = exp(scores[k] - highest)
    scores[seen:] = 0.0
    return np.float32(1.0) / row_sum(scores[:seen])


@parallel
def _attend(
    queries: Array, expanded: Array, turned: Array, heads: int, nope: int, value: int, scale: float, start: int,
    chosen: Array, cosine: Array, sine: Array, out: Array,
) -> None:  # fmt: skip
    (rows, total), width = (queries.shape[0], expanded.shape[0]), nope + turned.shape[1]
    panels, value_panels = (total + LANES - 1) // LANES, (value + LANES - 1) // LANES
    lanes, wide = panels * LANES, value_panels * LANES
    for h in prange(heads):
        keys, values = np.empty((panels, width, LANES), np.float32), np.empty((value_panels, total, LANES), np.float32)
        _pack(expanded, turned, h * (nope + value), nope, keys, values)
        query, scores = np.empty((_ROWS, width), np.float32), np.empty((_ROWS, lanes), np.float32)
        mixed, inverse = np.empty((_ROWS, wide), np.float32), np.empty(_ROWS, np.float32)
        for first in range(0, rows, _ROWS):
            count = min(_ROWS, rows - first)
            seen = start + first + count
            for i in range(count):
                at = start + first + i
                _load_query(queries, first + i, h, heads, nope, scale, cosine[at], sine[at], query, i)
            for p in range((seen + LANES - 1) // LANES):
                panel_product(
                    query, 0, width, 1, count, keys, p * width * LANES, LANES, width, scores, p * LANES, lanes
                )
            for i in range(count):
                at = start + first + i
                mine = chosen[first + i, : at + 1] if len(chosen) > 0 else chosen.reshape(-1)[:0]
                inverse[i] = _weigh(scores[i, :seen], at + 1, mine)
            for p in range(value_panels):
                panel_product(
                    scores, 0, lanes, 1, count, values, p * total * LANES, LANES, seen, mixed, p * LANES, wide
                )
            for i in range(count):
                target, source, scale_of = out[first + i, h * value : (h + 1) * value], mixed[i], inverse[i]
                for c in range(value):
                    target[c] = source[c] * scale_of
