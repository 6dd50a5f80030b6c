"""Log probabilities: what the model itself thought, before penalties and temperature. Knows arrays only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token and of the likeliest tokens at its position, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(
    logits: NDArray[np.floating], tokens: Sequence[int], tops: Sequence[int]
) -> tuple[TokenLogprob, ...]:
    """Log softmax of raw logits `[rows, vocab]` at one token and the `tops[row]` likeliest tokens per row."""
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return tuple(
        TokenLogprob(token, float(row[token]), _top(row, count))
        for row, token, count in zip(scores, tokens, tops, strict=True)
    )


def _top(row: NDArray[np.float64], count: int) -> tuple[tuple[int, float], ...]:
    count = min(count, len(row))
    if count == 0:
        return ()
    likeliest = np.argpartition(-row, count - 1)[:count]
    ordered = likeliest[np.lexsort((likeliest, -row[likeliest]))]
    return tuple((int(token), float(row[token])) for token in ordered)
