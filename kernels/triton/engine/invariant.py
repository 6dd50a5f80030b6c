"""Operators whose bits of a row depend on that row alone: one cut for every product, one split for every row's keys.

They serve where an answer must not depend on what else is computed (`batch_invariant`); what that costs is in
docs/benchmarks.md. Every other operator of this backend takes one row, or one head of it, a program, and is as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operands import (
    AttentionSpec,
    ExpertBank,
    GroupRouterSpec,
    HyperHead,
    HyperSite,
    MlaLayer,
    MlaSpec,
    Pages,
    Ragged,
    Ring,
    RopeTable,
    RouterSpec,
    Selection,
)
from kernels.reference.linear import Dense
from kernels.reference.route import choose
from kernels.triton.engine import attend as windows
from kernels.triton.engine import experts as banks
from kernels.triton.engine import latent as latents
from kernels.triton.engine import streams
from kernels.triton.engine.linear import few_rows
from kernels.triton.engine.routing import choose_in_groups
from kernels.triton.engine.rows import add_norm, norm

PARTS = 8  # of every row's keys
_EXPERT_ROWS = 16  # of one program of an expert's product
_ROWS, _COLUMNS = 64, 32  # of one program of a product

AttendLatent: TypeAlias = Callable[[Tensor, Tensor, MlaSpec, Ragged, Pages, Selection | None, RopeTable], Tensor]
StoreLatent: TypeAlias = Callable[[Tensor, MlaSpec, Ragged, Pages, RopeTable], None]


def linear(x: Tensor, weight: Dense) -> Tensor:
    """As reference.linear.linear."""
    (groups, columns, inner), rows = weight.matrix.shape, len(x)
    out = torch.empty(rows, groups * columns, dtype=torch.float32, device=x.device)
    _product[(triton.cdiv(columns, _COLUMNS), triton.cdiv(rows, _ROWS), groups)](
        x, x.stride(0), weight.matrix, out, rows, columns, inner, ROWS=_ROWS, COLUMNS=_COLUMNS,
        DEEP=64 if weight.rounds else 32, ROUNDS=weight.rounds, num_warps=4, num_stages=4 if weight.rounds else 2,
    )  # fmt: skip
    return out


def norm_linear(x: Tensor, weight_of_norm: Tensor, eps: float, weight: Dense) -> Tensor:
    """As reference.linear.linear of the norm of x, whose rows may stand apart."""
    return linear(norm(x, weight_of_norm, eps, _kind(weight)), weight)


def _kind(weight: Dense) -> torch.dtype:
    """What a product reads: one that is given it rounds nothing any more."""
    return torch.bfloat16 if weight.rounds else torch.float32


def experts(x: Tensor, chosen: Tensor, weights: Tensor, bank: ExpertBank) -> Tensor:
    """As reference.experts.experts."""
    return banks.many(x, chosen, weights, bank, None, _EXPERT_ROWS)


def attend_latent(
    absorbed: Tensor, turning: Tensor, spec: MlaSpec, ragged: Ragged, pages: Pages, selection: Selection | None,
    rope: RopeTable,
) -> Tensor:  # fmt: skip
    """As reference.mla.attend_latent."""
    query = latents.rotated(absorbed, turning, spec, ragged, rope)
    return latents.mix(*latents.attend(query, spec, ragged, pages, selection, PARTS))


def attend(
    queries: Tensor, fresh: Tensor, spec: AttentionSpec, ragged: Ragged, ring: Ring, pages: Pages | None,
    selection: Selection | None, rope: RopeTable,
) -> Tensor:  # fmt: skip
    """As reference.attend.attend."""
    return windows.attend(queries, fresh, spec, ragged, ring, pages, selection, rope, PARTS)


def route(x: Tensor, tokens: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """As reference.route.route."""
    scores = torch.nn.functional.softplus(linear(x, spec.gate)).sqrt()
    chosen = choose(scores, tokens, spec)
    weights = scores.gather(1, chosen)
    total = weights[:, 0]
    for slot in range(1, spec.topk):  # the library's sum of a row may depend on how many rows there are
        total = total + weights[:, slot]
    return chosen.to(torch.int32), weights / (total[:, None] + 1e-20) * spec.scaling


def route_groups(x: Tensor, spec: GroupRouterSpec) -> tuple[Tensor, Tensor]:
    """As reference.route_groups.route_groups."""
    return choose_in_groups(linear(x, spec.gate), spec)


def layer_with(
    attend_latent: AttendLatent, store_latent: StoreLatent = latents.store_latent
) -> Callable[[Tensor, MlaLayer, Ragged, Pages, RopeTable], Tensor]:
    """As reference.mla_layer.mla_layer, with this attention and cache."""
    return partial(_mla_layer, attend_latent, store_latent)


def _mla_layer(
    attend_latent: AttendLatent, store_latent: StoreLatent, x: Tensor, layer: MlaLayer, ragged: Ragged, pages: Pages,
    rope: RopeTable,
) -> Tensor:  # fmt: skip
    spec = layer.attention
    projected = norm_linear(x, layer.attention_norm, layer.norm_eps, layer.input)
    store_latent(projected, spec, ragged, pages, rope)
    queries = projected
    if layer.query is not None and layer.query_norm is not None:
        rank = layer.query_norm.shape[0]
        queries = norm_linear(projected[:, :rank], layer.query_norm, spec.norm_eps, layer.query)
    still, end = spec.heads * spec.nope, spec.heads * (spec.nope + spec.rope)
    absorbed, turning = linear(queries[:, :still], spec.absorb), queries[:, still:end]
    mixed = attend_latent(absorbed, turning, spec, ragged, pages, None, rope)
    return after_attention(x, linear(linear(mixed, spec.output), layer.output), layer)


def after_attention(x: Tensor, attended: Tensor, layer: MlaLayer) -> Tensor:
    """As kernels.triton.engine.mla_layer.after_attention."""
    x, normed, rounded = add_norm(x, attended, layer.mlp_norm, layer.norm_eps, _kind(layer.experts.gate))
    if layer.router is None:
        chosen, weights = x.new_empty(len(x), 0, dtype=torch.int32), x.new_empty(len(x), 0)
    else:
        chosen, weights = route_groups(normed, layer.router)
    return x + experts(rounded, chosen, weights, layer.experts)


def _coefficients(x: Tensor, site: HyperSite | HyperHead) -> Tensor:
    """Row after row: the matrix is small."""
    return few_rows(x.flatten(1), site.mix, eps=site.norm_eps, unit=True)


hyper_pre = partial(streams.hyper_pre, coefficients=_coefficients)
hyper_head = partial(streams.hyper_head, coefficients=_coefficients)


@triton.jit
def _product(
    x, stride, matrix, out, rows, columns, inner, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of COLUMNS outputs of one group."""
    group = tl.program_id(2).to(tl.int64)
    row, line = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEEP)
    source = x + row[:, None].to(tl.int64) * stride + group * inner
    begin = matrix + (group * columns + line[:, None]) * inner
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inner, DEEP):
        at = start + depth
        value = tl.load(source + at[None, :], mask=(row < rows)[:, None] & (at < inner)[None, :], other=0.0)
        weight = tl.load(begin + at[None, :], mask=(line < columns)[:, None] & (at < inner)[None, :], other=0.0)
        if ROUNDS:
            value = value.to(tl.bfloat16)
        total = tl.dot(value, tl.trans(weight), total, input_precision="tf32x3")
    target = out + row[:, None].to(tl.int64) * (tl.num_programs(2) * columns) + group * columns + line[None, :]
    tl.store(target, total, mask=(row < rows)[:, None] & (line < columns)[None, :])
