"""Products of weights kept as they are published, in torch: FP8 in squares that share a scale, or FP4.

Activations are cast to E4M3 with an fp32 scale for 128 channels of a row (reference/cast.py), products are summed
(reference/gemm.py) and rounded to bf16, as the makers of these weights serve them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.operands import ExpertBank
from kernels.reference.cast import CastSpec, Code, Scale, cast_rows
from kernels.reference.gemm import DEPTH, Activations, Fp4Weights, Fp8Weights, gemm, padded_tokens
from kernels.reference.swiglu import swiglu

CAST = CastSpec(Code.E4M3, DEPTH, Scale.FP32)


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """`groups` matrices [groups, out, in] as `keep` made them. `order` [groups * out]: which output column stands
    where, if not all in their own place."""

    weights: Any  # what the backend multiplies from; here Fp8Weights or Fp4Weights
    order: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class ScaledExperts:
    """Each a pair: gate with up below it [experts, 2 * inner, hidden], and down [experts, hidden, inner]. One is shared
    by all rows; where there are no others, `routed` is None."""

    routed: tuple[Scaled, Scaled] | None
    shared: tuple[Scaled, Scaled]


def keep(weights: Fp8Weights | Fp4Weights, order: Tensor | None = None) -> Scaled:
    """The weights as they are: [groups, out, in], `in` a multiple of 128."""
    return Scaled(weights, order)


def linear(x: Tensor, weight: Scaled) -> Tensor:
    """As reference.linear.linear, with bf16 values."""
    groups = len(weight.weights.codes)
    found = _product(x.unflatten(1, (groups, -1)).transpose(0, 1), weight.weights)
    product = found.transpose(0, 1).flatten(1)
    return product if weight.order is None else product[:, weight.order]


def experts(x: Tensor, chosen: Tensor, weights: Tensor, bank: ExpertBank) -> Tensor:
    """As reference.experts.experts; `bank.gate` is all of them."""
    kept: ScaledExperts = bank.gate
    out = _expert(x, kept.shared, 0, bank.limit)
    for e in range(bank.experts if kept.routed else 0):
        row, choice = torch.nonzero(chosen == e, as_tuple=True)
        if kept.routed and len(row):
            out.index_add_(0, row, _expert(x[row], kept.routed, e, bank.limit) * weights[row, choice, None])
    return out


def _expert(x: Tensor, pair: tuple[Scaled, Scaled], e: int, limit: float) -> Tensor:
    entering, leaving = (_one(scaled.weights, e) for scaled in pair)
    middle = _product(x[None], entering)[0]
    return _product(swiglu(middle, limit if math.isfinite(limit) else None, None)[None], leaving)[0]


def _one(weights: Fp8Weights | Fp4Weights, e: int) -> Fp8Weights | Fp4Weights:
    return type(weights)(weights.codes[e : e + 1], weights.scales[e : e + 1])


def _product(x: Tensor, weights: Fp8Weights | Fp4Weights) -> Tensor:
    """x [groups, rows, channels] -> bf16 values as fp32 [groups, rows, out]."""
    groups, rows, channels = x.shape
    codes, scales = cast_rows(x.reshape(-1, channels), CAST)
    padded = torch.zeros(groups, channels // DEPTH, padded_tokens(rows), device=x.device)
    padded[..., :rows] = scales.view(groups, rows, -1).mT
    found = gemm(Activations(codes.view(groups, rows, channels), padded), weights)
    return found.to(torch.bfloat16).to(torch.float32)
