"""Exact match without decoding: greedy output equals a target if and only if every argmax along the target does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.nano.data.mixture import classes, evaluation_problems
from models.nano.data.packing import Batch, batch_of, rows_of
from models.nano.data.render import Renderer, Sample
from models.nano.model import Rows

Predict = Callable[[Rows], Tensor]
"""Rows -> argmax token after each position [rows, tokens]."""


@dataclass(frozen=True, slots=True)
class Exam:
    """Packed held-out problems: batches, and for each batch the class of every mark."""

    batches: tuple[tuple[Batch, tuple[str, ...]], ...]


def make_exam(
    renderer: Renderer, number: int, seed: int, rows: int, row_blocks: int, kinds: set[str] | None = None
) -> Exam:
    """`number` held-out problems a class (of `kinds`, or all), packed into batches of exactly `rows` rows."""
    kind_of: dict[int, str] = {}

    def samples() -> Iterator[Sample]:
        for each in classes(renderer.count):
            if kinds is None or each.kind in kinds:
                for problem in evaluation_problems(each, number, seed):
                    sample = renderer.sample(problem)
                    kind_of[id(sample)] = each.kind
                    yield sample

    packed = list(rows_of(samples(), row_blocks))
    groups = [packed[start : start + rows] for start in range(0, len(packed), rows)]
    kinds_of = [tuple(kind_of[id(sample)] for row in group for sample in row) for group in groups]
    padded = [group + [[]] * (rows - len(group)) for group in groups]
    return Exam(tuple(zip((batch_of(group, row_blocks) for group in padded), kinds_of, strict=True)))


def rows_on(device: torch.device, batch: Batch, dense: bool = False) -> Rows:
    """The batch as training gives it, with every row's first two blocks as idle probes (one graph for all uses)."""
    ids = torch.from_numpy(batch.ids).to(device, torch.int64)
    documents = torch.from_numpy(batch.documents).to(device)
    probes = torch.zeros(ids.shape[0], 2, dtype=torch.int64, device=device)
    probes[:, 1] = 1
    return Rows(ids, documents, probes, torch.tensor(dense, device=device))


def accuracy(predict: Predict, exam: Exam, device: torch.device, dense: bool = False) -> dict[str, float]:
    """Share of problems whose whole target, reasoning included, greedy decoding would reproduce, by class."""
    right: dict[str, list[bool]] = {}
    for batch, kinds in exam.batches:
        predicted = predict(rows_on(device, batch, dense)).cpu().numpy()
        wrong = (predicted != batch.targets) & (batch.marks > 0)
        errors = np.bincount(batch.marks[wrong], minlength=len(kinds) + 1)
        for mark, kind in enumerate(kinds, 1):
            right.setdefault(kind, []).append(bool(errors[mark] == 0))
    return {kind: sum(each) / len(each) for kind, each in right.items()}
