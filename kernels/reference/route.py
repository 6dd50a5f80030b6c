"""Expert choice in torch: square root of softplus, biased for the choice only, or a table by token id."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from kernels.operands import RouterSpec, Weights
from kernels.reference.linear import linear

Product: TypeAlias = Callable[[torch.Tensor, Weights], torch.Tensor]


def route(
    x: torch.Tensor, tokens: torch.Tensor, spec: RouterSpec, product: Product = linear
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, hidden], tokens int64 [rows] -> experts int32 [rows, topk], weights fp32 [rows, topk].

    The weights are the unbiased scores over their sum, times the scaling. The lower expert wins a tie. `product`: as
    `linear`, of another backend.
    """
    scores = torch.nn.functional.softplus(product(x, spec.gate)).sqrt()
    chosen = choose(scores, tokens, spec)
    weights = scores.gather(1, chosen)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * spec.scaling
    return chosen.to(torch.int32), weights


def choose(scores: torch.Tensor, tokens: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """scores fp32 [rows, experts], tokens int64 [rows] -> experts [rows, topk], by the table or by biased score."""
    if spec.table is not None:
        return spec.table[tokens]
    biased = scores if spec.bias is None else scores + spec.bias
    return torch.sort(biased, dim=-1, descending=True, stable=True).indices[:, : spec.topk]
