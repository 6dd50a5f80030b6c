"""Sampler: one token for every row of a batch. Knows logits and parameters; knows no model and no requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.sampling.filters import Floats, draw, penalise, probabilities
from engine.sampling.logprobs import TokenLogprob, token_logprobs
from engine.sampling.params import SamplingParams
from engine.sampling.random import uniforms


@dataclass(frozen=True, slots=True)
class Row:
    """What the sampler must know about one row: its parameters and the tokens before it."""

    params: SamplingParams
    seed: int
    prompt: Sequence[int]
    output: Sequence[int]

    @property
    def plain(self) -> bool:
        """Whether the row needs neither penalties nor masks."""
        params = self.params
        penalised = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        return not penalised and len(self.output) >= params.min_tokens

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is all that is wanted of the row."""
        return self.params.temperature == 0.0 and self.params.logprobs is None

    @property
    def drawn(self) -> bool:
        """Whether a drawn token is all that is wanted of the row."""
        return self.params.temperature > 0.0 and self.params.logprobs is None


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen token; `token` is None when the row's logits are not finite."""

    token: int | None
    logprob: TokenLogprob | None


def choose(logits: NDArray[np.float32], rows: Sequence[Row], eos_token_ids: Sequence[int]) -> list[Choice]:
    """Choose a token for each row of `logits` `[rows, vocab]`; a row with a NaN or infinity fails alone."""
    finite = np.isfinite(logits).all(axis=1)
    good = np.flatnonzero(finite)
    choices = [Choice(None, None)] * len(rows)
    if len(good) == 0:
        return choices
    kept_logits = logits if len(good) == len(rows) else logits[good]
    kept = [rows[index] for index in good]
    tokens = _tokens(kept_logits, kept, eos_token_ids)
    wanted = [index for index, row in enumerate(kept) if row.params.logprobs is not None]
    tops = [kept[index].params.logprobs or 0 for index in wanted]
    logprobs = dict(
        zip(wanted, token_logprobs(kept_logits[wanted], [int(tokens[index]) for index in wanted], tops), strict=True)
        if wanted
        else ()
    )
    for index, place in enumerate(good):
        choices[place] = Choice(int(tokens[index]), logprobs.get(index))
    return choices


def _tokens(logits: NDArray[np.float32], rows: Sequence[Row], eos: Sequence[int]) -> NDArray[np.int64]:
    if all(row.params.temperature == 0.0 and row.plain for row in rows):
        greedy: NDArray[np.int64] = logits.argmax(axis=1)
        return greedy
    scores = logits.astype(np.float64)
    for index, row in enumerate(rows):
        if not row.plain:
            _adjust(scores[index], row, eos)
    tokens: NDArray[np.int64] = scores.argmax(axis=1)
    hot = [index for index, row in enumerate(rows) if row.params.temperature > 0.0]
    if hot:
        weights = probabilities(scores[hot], [rows[index].params for index in hot])
        points = uniforms([rows[index].seed for index in hot], [len(rows[index].output) for index in hot])
        tokens[hot] = draw(weights, points)
    return tokens


def _adjust(scores: Floats, row: Row, eos: Sequence[int]) -> None:
    penalise(scores, row.params, row.prompt, row.output)
    if len(row.output) < row.params.min_tokens:
        scores[[*eos, *row.params.stop_token_ids]] = -np.inf
