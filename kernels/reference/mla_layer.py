"""One whole layer of latent attention and experts in torch, as its operators in turn. Knows no cache layout."""

from __future__ import annotations

import torch

from kernels.operands import MlaLayer, Pages, Ragged, RopeTable
from kernels.reference.experts import experts
from kernels.reference.linear import linear
from kernels.reference.mla import attend_latent, store_latent
from kernels.reference.norm import norm
from kernels.reference.route_groups import route_groups


def mla_layer(x: torch.Tensor, layer: MlaLayer, ragged: Ragged, pages: Pages, rope: RopeTable) -> torch.Tensor:
    """x [rows, hidden] -> [rows, hidden] behind the layer, whose rows are cached; attention has the absorbed form."""
    x = x + _attention(norm(x, layer.attention_norm, layer.norm_eps), layer, ragged, pages, rope)
    normed, rows = norm(x, layer.mlp_norm, layer.norm_eps), len(x)
    if layer.router is None:
        chosen, weights = x.new_empty(rows, 0, dtype=torch.int32), x.new_empty(rows, 0)
    else:
        chosen, weights = route_groups(normed, layer.router)
    return x + experts(normed, chosen, weights, layer.experts)


def _attention(x: torch.Tensor, layer: MlaLayer, ragged: Ragged, pages: Pages, rope: RopeTable) -> torch.Tensor:
    spec = layer.attention
    projected = linear(x, layer.input)
    store_latent(projected, spec, ragged, pages, rope)
    queries = projected
    if layer.query is not None and layer.query_norm is not None:
        latent = norm(projected[:, : layer.query_norm.shape[0]], layer.query_norm, spec.norm_eps)
        queries = linear(latent, layer.query)
    still, end = spec.heads * spec.nope, spec.heads * (spec.nope + spec.rope)
    absorbed, turning = linear(queries[:, :still], spec.absorb), queries[:, still:end]
    mixed = attend_latent(absorbed, turning, spec, ragged, pages, None, rope)
    return linear(linear(mixed, spec.output), layer.output)
