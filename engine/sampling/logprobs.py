"""Log probabilities: what the model itself thought, before penalties and temperature. Knows arrays only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token and of the likeliest tokens at its position, best first.

    `rank` is the token's place among the whole vocabulary, from 1; of equally likely tokens the lower id goes first,
    in `top` as well.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def token_logprobs(
    logits: NDArray[np.floating], tokens: Sequence[int], tops: Sequence[int]
) -> tuple[TokenLogprob, ...]:
    """Log softmax of raw logits `[rows, vocab]` at one token and the `tops[row]` likeliest tokens per row."""
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return tuple(
        TokenLogprob(token, float(row[token]), _rank(row, token), _top(row, count))
        for row, token, count in zip(scores, tokens, tops, strict=True)
    )


def _rank(row: NDArray[np.float64], token: int) -> int:
    ahead = np.count_nonzero(row > row[token]) + np.count_nonzero(row[:token] == row[token])
    return int(ahead) + 1


def _top(row: NDArray[np.float64], count: int) -> tuple[tuple[int, float], ...]:
    count = min(count, len(row))
    if count == 0:
        return ()
    last = -np.partition(-row, count - 1)[count - 1]
    ahead = np.flatnonzero(row > last)
    likeliest = np.concatenate((ahead, np.flatnonzero(row == last)[: count - len(ahead)]))
    ordered = likeliest[np.lexsort((likeliest, -row[likeliest]))]
    return tuple((int(token), float(row[token])) for token in ordered)
