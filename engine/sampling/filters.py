"""Logit filters: penalties, masks and truncation of a distribution. Knows arrays only; every row is independent.

All maths is float64 numpy along the last axis: numpy reduces each row in an order that does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.sampling.params import SamplingParams

Floats = NDArray[np.float64]


def penalise(scores: Floats, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Apply the three penalties in place to one row `[vocab]`.

    Repetition divides positive and multiplies negative scores of every token seen; presence subtracts once and
    frequency per occurrence for tokens of the output.
    """
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.fromiter((*prompt, *output), dtype=np.int64))
        kept = scores[seen]
        scores[seen] = np.where(kept > 0, kept / params.repetition_penalty, kept * params.repetition_penalty)
    if output and (params.presence_penalty or params.frequency_penalty):
        tokens, counts = np.unique(np.fromiter(output, dtype=np.int64), return_counts=True)
        scores[tokens] -= params.presence_penalty + params.frequency_penalty * counts


def probabilities(scores: Floats, params: Sequence[SamplingParams]) -> Floats:
    """Distribution `[rows, vocab]` to draw from: temperature, then top-k, top-p and min-p. Temperatures are above 0.

    Each truncation keeps ties of the last kept score, so it does not depend on how a sort orders equals.
    """
    heat = np.array([row.temperature for row in params])[:, None]
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to minus infinity, as it should
        scaled = (scores - scores.max(axis=1, keepdims=True)) / heat
    for row, param in enumerate(params):
        if 0 < param.top_k < scaled.shape[1]:
            _keep_top_k(scaled[row], param.top_k)
    weights = np.exp(scaled)
    weights /= weights.sum(axis=1, keepdims=True)
    for row, param in enumerate(params):
        if param.top_p < 1.0:
            _keep_top_p(weights[row], param.top_p)
        if param.min_p > 0.0:
            weights[row][weights[row] < param.min_p * weights[row].max()] = 0.0
    normalised: Floats = weights / weights.sum(axis=1, keepdims=True)
    return normalised


def draw(weights: Floats, points: Floats) -> NDArray[np.int64]:
    """Token per row `[rows]` by inverse distribution: weights `[rows, vocab]`, points `[rows]` in [0, 1)."""
    bounds = np.cumsum(weights, axis=1)
    chosen = (bounds <= (points * bounds[:, -1])[:, None]).sum(axis=1)
    last = weights.shape[1] - 1 - np.argmax(weights[:, ::-1] > 0, axis=1)
    tokens: NDArray[np.int64] = np.minimum(chosen, last)
    return tokens


def _keep_top_k(scaled: Floats, count: int) -> None:
    floor = np.partition(scaled, -count)[-count]
    scaled[scaled < floor] = -np.inf


def _keep_top_p(weights: Floats, mass: float) -> None:
    """Keep the smallest set of likeliest tokens whose mass reaches `mass`.

    All tokens lighter than (1 - mass) / vocab weigh less than 1 - mass together, so that set lies among the others.
    """
    heavy = weights[weights >= (1.0 - mass) / len(weights)]
    ordered = np.sort(heavy)[::-1]
    kept = int(np.searchsorted(np.cumsum(ordered), mass, side="left"))
    weights[weights < ordered[min(kept, len(ordered) - 1)]] = 0.0
