"""One whole layer of latent attention and experts on Hopper, where its attention is dense decode's."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cuda.engine import domain
from kernels.cuda.engine.choice import choose_in_groups
from kernels.cuda.engine.latent import attend_all, leave, rotated
from kernels.operands import MlaLayer, Pages, Ragged, RopeTable
from kernels.triton.engine import mla_layer as by_triton
from kernels.triton.engine.experts import expert_rows
from kernels.triton.engine.latent import store_latent
from kernels.triton.engine.linear import FEW_ROWS, linear
from kernels.triton.engine.rows import norm


def mla_layer(x: Tensor, layer: MlaLayer, ragged: Ragged, pages: Pages, rope: RopeTable) -> Tensor:
    """As reference.mla_layer.mla_layer."""
    spec, eps, router = layer.attention, layer.norm_eps, layer.router
    if len(x) <= FEW_ROWS or not domain.attends_densely(spec, pages, len(x)):
        return by_triton.mla_layer(x, layer, ragged, pages, rope)
    projected = linear(norm(x, layer.attention_norm, eps), layer.input)
    store_latent(projected, spec, ragged, pages, rope)
    queries = projected
    if layer.query is not None and layer.query_norm is not None:
        rank = layer.query_norm.shape[0]
        queries = linear(norm(projected[:, :rank], layer.query_norm, spec.norm_eps), layer.query)
    still, end = spec.heads * spec.nope, spec.heads * (spec.nope + spec.rope)
    query = rotated(linear(queries[:, :still], spec.absorb), queries[:, still:end], spec, ragged, rope)
    x = x + linear(leave(attend_all(query, spec, ragged, pages), spec.output), layer.output)
    normed = norm(x, layer.mlp_norm, eps)
    if router is None:
        chosen, weights = x.new_empty(len(x), 0, dtype=torch.int32), x.new_empty(len(x), 0)
    else:
        chosen, weights = choose_in_groups(linear(normed, router.gate), router)
    return expert_rows(normed, chosen, weights, layer.experts, None, 0.0, x)
