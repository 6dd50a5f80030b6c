"""Expert choice from router logits, in torch: scores, bias, groups, top-k, weights, replicas. Knows no router matrix.

Scores are softmax, sigmoid or the square root of softplus of the logits; a bias moves the choice alone. With groups,
those with the highest sums of their `group_best` best biased scores are kept. NaN ranks above every number, and of
equal experts or groups the lower wins. Weights are unbiased scores, over their sum if `normalized`, times `scaling`.
A hash router takes its experts from a table by token id. With replicas, the physical expert of a row is the
(row modulo count)-th replica of the chosen one, so that rows spread evenly and nothing is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from kernels.errors import KernelError
from kernels.reference.top_k import ordered


class Score(Enum):
    """What becomes of a logit; the value is the number the kernel is compiled with."""

    SOFTMAX = 0
    SIGMOID = 1
    SQRT_SOFTPLUS = 2


@dataclass(frozen=True, slots=True)
class GateSpec:
    """A router's constants. `hashed`: experts come from a table."""

    experts: int
    topk: int
    score: Score
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 1
    normalized: bool = True
    scaling: float = 1.0
    hashed: bool = False

    def __post_init__(self) -> None:
        size = self.experts // max(self.groups, 1)
        if not 1 <= self.topk <= min(32, size * self.kept_groups) or not 1 <= self.experts <= 1024:
            found = f"{self.topk} of {self.experts} experts"
            raise KernelError(found, fix="at most 32 of 1024, all in the kept groups")
        fits = 1 <= self.kept_groups <= self.groups <= 32 and self.groups * size == self.experts
        if not fits or not 1 <= self.group_best <= size:
            raise KernelError(
                f"{self.kept_groups} of {self.groups} groups by {self.group_best} experts",
                fix="at most 32 groups of one size, ranked by no more experts than they have",
            )


@dataclass(frozen=True, slots=True, eq=False)
class GateOperands:
    """logits fp32 [rows, experts]; bias fp32 [experts]; table int32 [vocabulary, topk]; tokens int64 [rows];
    replicas int32 [experts, most] (physical experts) and replica_counts int32 [experts]."""

    logits: Tensor
    bias: Tensor | None = None
    table: Tensor | None = None
    tokens: Tensor | None = None
    replicas: Tensor | None = None
    replica_counts: Tensor | None = None


def gate(spec: GateSpec, given: GateOperands) -> tuple[Tensor, Tensor]:
    """Experts int32 [rows, topk], best first, and weights in the precision of the logits. Raises KernelError."""
    check_operands(spec, given)
    return gate_of_scores(spec, given, scores_of(spec, given.logits))


def scores_of(spec: GateSpec, logits: Tensor) -> Tensor:
    """Unbiased scores [rows, experts]."""
    if spec.score is Score.SOFTMAX:
        return logits.softmax(-1)
    return logits.sigmoid() if spec.score is Score.SIGMOID else torch.nn.functional.softplus(logits).sqrt()


def gate_of_scores(spec: GateSpec, given: GateOperands, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The same from scores that are known."""
    if given.table is not None and given.tokens is not None:
        chosen = given.table[given.tokens].long()
    else:
        chosen = _chosen(spec, scores if given.bias is None else scores + given.bias)
    weights = scores.gather(1, chosen)
    if spec.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if given.replicas is not None and given.replica_counts is not None:
        row = torch.arange(len(chosen), device=chosen.device)[:, None]
        chosen = given.replicas[chosen, row % given.replica_counts[chosen]]
    return chosen.to(torch.int32), weights * spec.scaling


def check_operands(spec: GateSpec, given: GateOperands) -> None:
    """Raises KernelError naming the first operand that no implementation takes."""
    rows = given.logits.shape[0]
    wanted = [("logits", given.logits, (torch.float32, torch.float64), (rows, spec.experts))]
    if (given.table is None) is spec.hashed or (given.tokens is None) is spec.hashed:
        raise KernelError("table and tokens belong to a hash router", fix="pass both, or neither")
    if (given.replicas is None) != (given.replica_counts is None):
        raise KernelError("replicas without their counts", fix="pass both, or neither")
    if given.bias is not None:
        wanted.append(("bias", given.bias, (torch.float32,), (spec.experts,)))
    if given.table is not None and given.tokens is not None:
        wanted.append(("table", given.table, (torch.int32,), (given.table.shape[0], spec.topk)))
        wanted.append(("tokens", given.tokens, (torch.int64,), (rows,)))
    if given.replicas is not None and given.replica_counts is not None:
        wanted.append(("replicas", given.replicas, (torch.int32,), (spec.experts, given.replicas.shape[-1])))
        wanted.append(("replica_counts", given.replica_counts, (torch.int32,), (spec.experts,)))
    for name, tensor, dtypes, shape in wanted:
        if tensor.dtype not in dtypes or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise KernelError(f"{name} is {found}", fix=f"pass contiguous {dtypes[0]} {list(shape)}")


def _chosen(spec: GateSpec, biased: Tensor) -> Tensor:
    """int64 [rows, topk]."""
    keys = ordered(biased)
    if spec.kept_groups < spec.groups:
        grouped = keys.unflatten(1, (spec.groups, -1))
        best = grouped.topk(spec.group_best, -1).indices
        ranks = ordered(biased.unflatten(1, (spec.groups, -1)).gather(2, best).sum(-1))
        kept = ranks.sort(dim=-1, descending=True, stable=True).indices[:, : spec.kept_groups]
        closed = torch.ones_like(ranks, dtype=torch.bool).scatter_(1, kept, False)
        keys = grouped.masked_fill(closed[..., None], -1).flatten(1)
    return keys.sort(dim=-1, descending=True, stable=True).indices[:, : spec.topk]
