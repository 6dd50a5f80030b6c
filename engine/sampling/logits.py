"""Logits of one step, wherever they are: chosen from on the device where that is enough, else copied over once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling.drawing import drawn
from engine.sampling.sampler import Choice, Row, choose
from kernels.likeliest import likeliest
from kernels.sampler import sampler_of
from kernels.staging import on_device


class Logits:
    """fp32 `[rows, vocab]`. On a device, making them waits until the step is done."""

    def __init__(self, logits: torch.Tensor, found: torch.Tensor | None = None, drawn: bool = False) -> None:
        """`found`: what `likeliest` says of these rows, and perhaps of more behind them, where it is known. `drawn`:
        where a drawn token is all that is wanted of a row, it stands there."""
        self._logits, self._best, self._drawn = logits, None, drawn
        if logits.is_cuda and len(logits):
            self._best = (likeliest(logits) if found is None else found).cpu().numpy()

    @cached_property
    def array(self) -> NDArray[np.float32]:
        """All of them on the host."""
        return self._logits.cpu().numpy()

    def choose(self, places: Sequence[int], rows: Sequence[Row], eos_token_ids: Sequence[int]) -> list[Choice]:
        """As `sampler.choose`, of the logits at `places`.

        On a device, rows that want a token alone get it there: the likeliest, or one drawn in integers, which is the
        host's but where its point lies within fp32's rounding of a bound. What is asked of a row decides, so that its
        token does not depend on the others. The rest comes to the host.
        """
        if self._best is None:
            return choose(self.array[places], rows, eos_token_ids)
        (tokens, finite), sample = self._best, sampler_of(self._logits.device)
        choices: list[Choice] = [Choice(int(tokens[place]) if finite[place] else None, None) for place in places]
        hot = [index for index, row in enumerate(rows) if row.drawn and row.plain]
        if sample is None and not self._drawn:
            hot = []
        elif sample is not None and hot and not self._drawn:
            taken = drawn(sample, self._at([places[index] for index in hot]), [rows[index] for index in hot])
            for index, token in zip(hot, taken.tolist(), strict=True):
                choices[index] = Choice(token if finite[places[index]] else None, None)
        settled = set(hot)
        rest = [index for index, row in enumerate(rows) if index not in settled and not (row.greedy and row.plain)]
        if rest:
            array = self._at([places[index] for index in rest]).cpu().numpy()
            for index, choice in zip(rest, choose(array, [rows[index] for index in rest], eos_token_ids), strict=True):
                choices[index] = choice
        return choices

    def _at(self, places: list[int]) -> torch.Tensor:
        """The logits at these places, where they are."""
        if places == list(range(len(self._logits))):
            return self._logits
        return self._logits[on_device(np.array(places), self._logits.device)]
