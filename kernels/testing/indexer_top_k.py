"""The check of chosen keys against the scores of the kernel that writes them. Knows no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kernels.reference.indexer_top_k import best_of
from kernels.reference.mqa_logits import MqaOperands
from kernels.testing.mqa_logits import few_of


def make_rising(given: MqaOperands) -> MqaOperands:
    """The later a key of a page, the higher its scores: those found first have to give way."""
    scales = given.keys.scales
    scales.copy_(torch.linspace(0.01, 1, scales.shape[1], device=scales.device).expand_as(scales))
    return replace(given, weights=given.weights.abs())


def assert_best(
    given: MqaOperands, count: int, scores: Tensor, run: Callable[[MqaOperands, Tensor], None], most: int = 16
) -> None:
    """Runs three times into poisoned memory; AssertionError where it is not the best of `scores` [tokens, columns]."""
    found = [torch.full((len(given.ends), count), -7, dtype=torch.int32, device=scores.device) for _ in range(3)]
    for one in found:
        run(given, one)
    if not (torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])):
        raise AssertionError("a repeated call chose other keys")
    few, tokens = few_of(given, most)
    expected, rows = best_of(scores[tokens], few, count), found[0][tokens]
    wrong = (rows != expected).any(1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        place = int((rows[row] != expected[row]).nonzero()[0])
        raise AssertionError(
            f"{int(wrong.sum())} of {len(rows)} tokens, first {int(tokens[row])}: place {place} has "
            f"{int(rows[row, place])}, expected {int(expected[row, place])}"
        )
