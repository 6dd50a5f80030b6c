"""One whole layer of latent attention and experts on Hopper: where its attention is dense decode's, or its weights are
kept as they are published."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cuda.engine import domain, scaled
from kernels.cuda.engine.choice import choose_in_groups
from kernels.cuda.engine.latent import attend_all, rotated
from kernels.cuda.engine.records import store_latent
from kernels.operands import MlaLayer, MlaSpec, Pages, Ragged, RopeTable, Weights
from kernels.reference.scaled import Scaled, ScaledExperts
from kernels.triton.engine import latent as by_triton
from kernels.triton.engine import mla_layer as whole_by_triton
from kernels.triton.engine.experts import expert_rows
from kernels.triton.engine.linear import is_few, read_as
from kernels.triton.engine.linear import linear as dense_linear
from kernels.triton.engine.rows import add_norm, norm


def mla_layer(x: Tensor, layer: MlaLayer, ragged: Ragged, pages: Pages, rope: RopeTable) -> Tensor:
    """As reference.mla_layer.mla_layer."""
    takes = domain.beats_the_chain if is_few(*x.shape) else domain.attends_densely
    if not _is_kept(layer) and not takes(layer.attention, pages, len(x)):
        return whole_by_triton.mla_layer(x, layer, ragged, pages, rope)
    spec = layer.attention
    projected = norm_linear(x, layer.attention_norm, layer.norm_eps, layer.input)
    store_latent(projected, spec, ragged, pages, rope)
    queries = projected
    if layer.query is not None and layer.query_norm is not None:
        rank = layer.query_norm.shape[0]
        queries = norm_linear(projected[:, :rank], layer.query_norm, spec.norm_eps, layer.query)
    attended = linear(_attended(queries, spec, ragged, pages, rope, _read_as(layer.output, len(x))), layer.output)
    return after_attention(x, attended, layer)


def after_attention(x: Tensor, attended: Tensor, layer: MlaLayer) -> Tensor:
    """As kernels.triton.engine.mla_layer.after_attention."""
    router, bank, is_kept = layer.router, layer.experts, isinstance(layer.experts.gate, ScaledExperts)
    if is_few(*x.shape) and not is_kept:
        return whole_by_triton.after_attention(x, attended, layer)
    x, normed, rounded = add_norm(x, attended, layer.mlp_norm, layer.norm_eps, _read_as(bank.gate, len(x)))
    if router is None:
        chosen, weights = x.new_empty(len(x), 0, dtype=torch.int32), x.new_empty(len(x), 0)
    else:
        chosen, weights = choose_in_groups(linear(normed, router.gate), router)
    if is_kept:
        return scaled.experts(normed, chosen, weights, bank, x)
    return expert_rows(rounded, chosen, weights, bank, None, 0.0, x)


def linear(x: Tensor, weight: Weights) -> Tensor:
    """As reference.linear.linear."""
    return scaled.linear(x, weight) if isinstance(weight, Scaled) else dense_linear(x, weight)


def norm_linear(x: Tensor, weight_of_norm: Tensor, eps: float, weight: Weights) -> Tensor:
    """`linear` of the norm of x, whose rows may stand apart."""
    if not isinstance(weight, Scaled):
        return whole_by_triton.norm_linear(x, weight_of_norm, eps, weight)
    if scaled.takes_norms(weight):
        return scaled.norm_linear(x, weight_of_norm, eps, weight)
    return scaled.linear(norm(x, weight_of_norm, eps), weight)


def _read_as(weight: Weights, rows: int) -> torch.dtype:
    """The type that a product of so many rows reads; weights that are kept cast it themselves."""
    return torch.float32 if isinstance(weight, Scaled | ScaledExperts) else read_as(weight, rows)


def _is_kept(layer: MlaLayer) -> bool:
    weights = (layer.input, layer.query, layer.output, layer.experts.gate)
    return any(isinstance(weight, Scaled | ScaledExperts) for weight in weights)


def _attended(
    queries: Tensor, spec: MlaSpec, ragged: Ragged, pages: Pages, rope: RopeTable, kind: torch.dtype
) -> Tensor:
    """The heads' values [rows, heads * value] in the type `kind`, of queries [rows, >= heads * (nope + rope)]."""
    still, end = spec.heads * spec.nope, spec.heads * (spec.nope + spec.rope)
    absorbed, turning = dense_linear(queries[:, :still], spec.absorb), queries[:, still:end]
    if domain.attends_densely(spec, pages, len(queries)):
        mixed = attend_all(rotated(absorbed, turning, spec, ragged, rope), spec, ragged, pages).flatten(1)
        few = is_few(len(queries), spec.rank)  # whose product takes fp32
        return dense_linear(mixed.to(torch.float32) if few else mixed, spec.output, kind)
    return dense_linear(by_triton.attend_latent(absorbed, turning, spec, ragged, pages, None, rope), spec.output, kind)
