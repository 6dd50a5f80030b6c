"""Logits of one step, wherever they are: chosen from on the device where that is enough, else copied over once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling.sampler import Choice, Row, choose


class Logits:
    """fp32 `[rows, vocab]`."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        self._best = _best(logits) if logits.is_cuda and len(logits) else None

    @cached_property
    def array(self) -> NDArray[np.float32]:
        """All of them on the host."""
        return self._logits.cpu().numpy()

    def choose(self, places: Sequence[int], rows: Sequence[Row], eos_token_ids: Sequence[int]) -> list[Choice]:
        """As `sampler.choose`, of the logits at `places`."""
        if self._best is None or not all(row.plain and row.greedy for row in rows):
            return choose(self.array[places], rows, eos_token_ids)
        tokens, finite = self._best
        return [Choice(int(tokens[place]) if finite[place] else None, None) for place in places]


def _best(logits: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Each row's first best token, and whether the row is finite; one copy, which also says that the step is done."""
    found = torch.stack([logits.argmax(1), logits.isfinite().all(1).long()]).cpu().numpy()
    return found[0], found[1].astype(bool)
