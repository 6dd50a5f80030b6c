"""One whole layer of latent attention and experts on a GPU, its norms and sums within the products around them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.operands import MlaLayer, Pages, Ragged, RopeTable
from kernels.reference.linear import Dense
from kernels.triton.engine import latent
from kernels.triton.engine.experts import expert_rows
from kernels.triton.engine.few_experts import chosen_rows, routed_rows
from kernels.triton.engine.linear import NARROW, few_rows, is_few, linear, read_as
from kernels.triton.engine.routing import choose_in_groups
from kernels.triton.engine.rows import add_norm, norm


def mla_layer(x: Tensor, layer: MlaLayer, ragged: Ragged, pages: Pages, rope: RopeTable) -> Tensor:
    """As reference.mla_layer.mla_layer."""
    return _few(x, layer, ragged, pages, rope) if is_few(*x.shape) else _many(x, layer, ragged, pages, rope)


def _few(x: Tensor, layer: MlaLayer, ragged: Ragged, pages: Pages, rope: RopeTable) -> Tensor:
    spec, eps = layer.attention, layer.norm_eps
    projected = few_rows(x, layer.input, layer.attention_norm, eps)
    queries = projected if layer.query is None else few_rows(projected, layer.query, layer.query_norm, spec.norm_eps)
    mixed = latent.attend(latent.absorb(queries, projected, spec, ragged, pages, rope), spec, ragged, pages, None)
    x = few_rows(latent.leave(*mixed, spec.output), layer.output, residual=x)
    if x.shape[1] <= NARROW:
        return _fused(x, layer)
    normed = norm(x, layer.mlp_norm, eps)
    return _with_experts(x, normed, normed, layer)


def _many(x: Tensor, layer: MlaLayer, ragged: Ragged, pages: Pages, rope: RopeTable) -> Tensor:
    spec = layer.attention
    projected = norm_linear(x, layer.attention_norm, layer.norm_eps, layer.input)
    latent.store_latent(projected, spec, ragged, pages, rope)
    queries = projected
    if layer.query is not None and layer.query_norm is not None:
        rank = layer.query_norm.shape[0]
        queries = norm_linear(projected[:, :rank], layer.query_norm, spec.norm_eps, layer.query)
    still, end = spec.heads * spec.nope, spec.heads * (spec.nope + spec.rope)
    absorbed, turning = linear(queries[:, :still], spec.absorb), queries[:, still:end]
    mixed = latent.attend_latent(absorbed, turning, spec, ragged, pages, None, rope)
    return after_attention(x, linear(linear(mixed, spec.output, read_as(layer.output, len(x))), layer.output), layer)


def after_attention(x: Tensor, attended: Tensor, layer: MlaLayer) -> Tensor:
    """x plus what attention gave, and the experts of that sum's norm added to it."""
    if is_few(*x.shape) and x.shape[1] <= NARROW:
        return _fused(x + attended, layer)
    kind = read_as(layer.experts.gate, len(x))
    return _with_experts(*add_norm(x, attended, layer.mlp_norm, layer.norm_eps, kind), layer)


def _fused(x: Tensor, layer: MlaLayer) -> Tensor:
    """x plus the experts of its norm, which each of their programs makes by itself."""
    if layer.router is None:
        return chosen_rows(x, *_nobody(x), layer.experts, layer.mlp_norm, layer.norm_eps, x)
    return routed_rows(x, layer.router, layer.experts, layer.mlp_norm, layer.norm_eps, x)


def _with_experts(x: Tensor, normed: Tensor, rounded: Tensor, layer: MlaLayer) -> Tensor:
    """x plus the experts of its norm, which is given in fp32 and as experts read it."""
    router = layer.router
    chosen, weights = _nobody(x) if router is None else choose_in_groups(linear(normed, router.gate), router)
    return expert_rows(rounded, chosen, weights, layer.experts, None, 0.0, x)


def norm_linear(x: Tensor, weight_of_norm: Tensor, eps: float, weight: Dense) -> Tensor:
    """As reference.linear.linear of the norm of x, whose rows may stand apart."""
    if is_few(len(x), weight.matrix.shape[2]):
        return few_rows(x, weight, weight_of_norm, eps)
    return linear(norm(x, weight_of_norm, eps, read_as(weight, len(x))), weight)


def _nobody(x: Tensor) -> tuple[Tensor, Tensor]:
    """No expert for any row, but for the one that all rows take."""
    return x.new_empty(len(x), 0, dtype=torch.int32), x.new_empty(len(x), 0)
