"""Scores for exact top-k, friendly and hostile, and the check against the definition. Knows no clock."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.reference.top_k import top_k

HOSTILE = ("normal", "equal", "few", "nan", "masked", "narrow", "zeros", "rising")


def make_scores(kind: str, rows: int, columns: int, device: torch.device, seed: int) -> Tensor:
    """fp32 [rows, columns] in rows that start at multiples of 16 bytes; what lies between the rows is NaN."""
    draw = torch.Generator(device).manual_seed(seed)
    wide = torch.full((rows, -(-columns // 4) * 4), torch.nan, device=device)
    scores = wide[:, :columns]
    scores.copy_(torch.randn(rows, columns, generator=draw, device=device))
    if kind == "equal":
        scores.fill_(1.5)
    if kind == "few":
        scores.copy_((scores * 1.5).round())
    if kind == "nan":
        scores[:, ::7], scores[:, 1::3] = torch.nan, torch.inf
    if kind == "masked":
        scores[scores < 1.9] = -torch.inf
    if kind == "narrow":  # all digits but the last few are the same
        scores.copy_(1 + scores.abs() * 2.0**-22)
    if kind == "zeros":
        scores.copy_(scores.sign() * 0.0)
    if kind == "rising":
        scores.copy_(scores.sort(1).values)
    return scores


def make_lengths(rows: int, columns: int, device: torch.device) -> Tensor:
    """int32 [rows] between nothing and all."""
    some = [0, 1, columns, columns - 1, columns // 2, columns // 3 + 1, 7]
    return torch.tensor([min(some[i % 7], columns) for i in range(rows)], dtype=torch.int32, device=device)


def assert_top_k(
    scores: Tensor, count: int, lengths: Tensor | None, run: Callable[[Tensor, Tensor | None, Tensor], None],
    turns: int = 2,
) -> None:  # fmt: skip
    """Runs into poisoned memory (twice where threads may race) and compares with the definition. AssertionError."""
    expected = top_k(scores, count, lengths)
    for turn in ("the", "a repeated")[:turns]:
        found = torch.full((scores.shape[0], count), -7, dtype=torch.int32, device=scores.device)
        run(scores, lengths, found)
        wrong = (found != expected).any(1)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            place = int((found[row] != expected[row]).nonzero()[0])
            raise AssertionError(
                f"{turn} call: row {row}, place {place}: {int(found[row, place])}, expected {int(expected[row, place])}"
            )
