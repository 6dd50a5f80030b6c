"""Logits of one step, wherever they are: chosen from on the device where that is enough, else copied over once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling.sampler import Choice, Row, choose
from kernels.likeliest import likeliest


class Logits:
    """fp32 `[rows, vocab]`. On a device, making them waits until the step is done."""

    def __init__(self, logits: torch.Tensor, found: torch.Tensor | None = None) -> None:
        """`found`: what `likeliest` says of these rows, and perhaps of more behind them, where it is known."""
        self._logits, self._best = logits, None
        if logits.is_cuda and len(logits):
            self._best = (likeliest(logits) if found is None else found).cpu().numpy()

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
