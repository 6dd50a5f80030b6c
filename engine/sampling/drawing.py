"""Drawing on a device: the parameters of a batch's rows in one copy, their tokens in another. Knows no distribution.

Behind a captured step the draw is a graph as well, whose parameters lie in memory that stays: `CapturedDraw`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.sampler import Row
from kernels.reference.sampling import SamplingRows
from kernels.sampler import Sample
from kernels.staging import on_device

_COLDEST = 1e-20  # below, fp32 has no inverse of a temperature, and only the likeliest token weighs anything
_MOST = 2**31 - 1


def drawn(sample: Sample, logits: Tensor, rows: Sequence[Row]) -> NDArray[np.int32]:
    """A token for each row of logits fp32 [rows, vocabulary]. Waits for them."""
    return sample(logits, parameters(rows, logits.device)).cpu().numpy()


def parameters(rows: Sequence[Row], device: torch.device) -> SamplingRows:
    """What the draw of every row needs, on `device`."""
    return named(on_device(flat(rows, len(rows)), device))


def flat(rows: Sequence[Row], size: int) -> NDArray[np.int32]:
    """The same as words, 8 for each of `size` rows, those behind `rows` nobody's: of these, and of rows of which more
    is wanted than a drawn token, the temperature is 0."""
    count, given = len(rows), [row.params for row in rows]
    whole = np.zeros(8 * size, np.int32)
    long, short = whole[: 4 * size].view(np.uint64).reshape(2, size), whole[4 * size :].reshape(4, size)
    long[0, :count], long[1, :count] = [row.seed for row in rows], [len(row.output) for row in rows]
    floats = short.view(np.float32)
    floats[0, :count] = [
        row.params.temperature if row.drawn and row.plain and row.params.temperature > _COLDEST else 0.0 for row in rows
    ]
    floats[1, :count], floats[2, :count] = [one.top_p for one in given], [one.min_p for one in given]
    short[3, :count] = [min(one.top_k, _MOST) for one in given]
    return whole


def following(words: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """What `flat` says of the same `count` rows once each has one token more."""
    size, moved = len(words) // 8, words.copy()
    moved[2 * size : 4 * size].view(np.uint64)[:count] += 1
    return moved


def named(on: Tensor) -> SamplingRows:
    """The words of `flat` by their names, where they are."""
    size = len(on) // 8
    seeds, draws = on[: 4 * size].view(torch.int64).view(2, size)
    temperature, top_p, min_p = on[4 * size : 7 * size].view(torch.float32).view(3, size)
    return SamplingRows(temperature, on[7 * size :], top_p, min_p, seeds, draws)


class CapturedDraw:
    """The draw behind a captured step of one size: `replay` puts drawn tokens into what the step found."""

    def __init__(self, sample: Sample, logits: Tensor, found: Tensor, memory: Any) -> None:
        """`logits` [size, vocabulary] and `found` [2, size] of the step, as kernels.likeliest.likeliest says; `memory`
        of its graph."""
        self._sample, self._logits, self._found = sample, logits, found
        self._words = torch.zeros(8 * len(logits), dtype=torch.int32, device=logits.device)
        self._host = torch.zeros(8 * len(logits), dtype=torch.int32).pin_memory()
        self.rows = named(self._words)
        self._draw()  # compiles
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=memory):
            self._draw()

    def lay(self, words: NDArray[np.int32]) -> None:
        """Queue the copy of `flat` of the next step's rows; the one before must have ended."""
        self._host.numpy()[:] = words
        self._words.copy_(self._host, non_blocking=True)

    def replay(self) -> None:
        """Queue the draw."""
        self._graph.replay()

    def _draw(self) -> None:
        tokens = self._sample(self._logits, self.rows).clamp_min(0)
        self._found[0].copy_(torch.where(self.rows.temperature > 0, tokens, self._found[0]))
