"""Matrix products in torch. Knows grouped weights; knows nothing of what they project."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.reference import scaled


@dataclass(frozen=True, slots=True)
class Dense:
    """`groups` matrices [groups, out, in]. `rounds`: the compute type is bf16; operands are rounded, sums fp32."""

    matrix: torch.Tensor
    rounds: bool


def pack(weight: torch.Tensor, rounds: bool) -> Dense:
    """weight [groups, out, in] in bf16 if the compute type rounds to it, else fp32."""
    return Dense(weight.to(torch.bfloat16 if rounds else torch.float32).contiguous(), rounds)


def linear(x: torch.Tensor, weight: Dense | scaled.Scaled) -> torch.Tensor:
    """x [rows, groups * in] times each group's matrix, group by group -> fp32 [rows, groups * out]."""
    if isinstance(weight, scaled.Scaled):
        return scaled.linear(x, weight)
    groups, _, inner = weight.matrix.shape
    parts = operand(x, weight).view(x.shape[0], groups, inner)
    return torch.einsum("rgi,goi->rgo", parts, weight.matrix.to(torch.float32)).flatten(1)


def operand(x: torch.Tensor, weight: Dense) -> torch.Tensor:
    """x as this product sees it."""
    return x.to(torch.bfloat16).to(torch.float32) if weight.rounds else x
