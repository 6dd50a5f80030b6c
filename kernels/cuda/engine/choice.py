"""Choices on Hopper: experts of a row, and its best entries. One launch each, and nothing is sorted."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cuda import gate as gate_kernel
from kernels.cuda import top_k as top_k_kernel
from kernels.cuda.engine import domain
from kernels.cuda.engine.index import Workspaces, workspaces
from kernels.cuda.engine.index import index_topk as of_records
from kernels.operands import GroupRouterSpec, IndexerSpec, Pages, Ragged, RopeTable, RouterSpec, Selection
from kernels.reference.gate import GateOperands, GateSpec, Score
from kernels.reference.route import route as route_by_torch
from kernels.reference.top_k import top_k as top_k_by_torch
from kernels.triton.engine import index, invariant, routing
from kernels.triton.engine.linear import linear

_SHARED = workspaces()


def route(x: Tensor, tokens: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """As reference.route.route."""
    if not domain.gates(spec):
        return route_by_torch(x, tokens, spec, linear)
    return _gated(linear(x, spec.gate), gate_spec(spec), spec.bias)


def route_invariant(x: Tensor, tokens: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """As `route`, with logits that do not depend on how many rows there are."""
    if not domain.gates(spec):
        return invariant.route(x, tokens, spec)
    return _gated(invariant.linear(x, spec.gate), gate_spec(spec), spec.bias)


def route_groups(x: Tensor, spec: GroupRouterSpec) -> tuple[Tensor, Tensor]:
    """As reference.route_groups.route_groups."""
    return choose_in_groups(linear(x, spec.gate), spec)


def choose_in_groups(logits: Tensor, spec: GroupRouterSpec) -> tuple[Tensor, Tensor]:
    """As kernels.triton.engine.routing.choose_in_groups."""
    if not domain.gates(spec):
        return routing.choose_in_groups(logits, spec)
    return _gated(logits, gate_spec(spec), spec.bias)


def gate_spec(spec: RouterSpec | GroupRouterSpec) -> GateSpec:
    """The constants of a router that `domain.gates` admits."""
    if isinstance(spec, RouterSpec):
        return GateSpec(spec.experts, spec.topk, Score.SQRT_SOFTPLUS, scaling=spec.scaling)
    score = Score.SIGMOID if spec.sigmoid else Score.SOFTMAX
    groups = (spec.groups, spec.kept_groups, spec.group_best)
    return GateSpec(spec.experts, spec.topk, score, *groups, normalized=spec.normalize, scaling=spec.scaling)


def top_k(scores: Tensor, count: int, lengths: Tensor | None = None) -> Tensor:
    """As reference.top_k.top_k."""
    if not domain.ranks(scores):
        return top_k_by_torch(scores, count, lengths)
    indices = torch.empty(len(scores), count, dtype=torch.int32, device=scores.device)
    top_k_kernel.top_k(scores, lengths, indices)
    return indices


def index_topk(
    queries: Tensor, projected: Tensor, spec: IndexerSpec, ragged: Ragged, pages: Pages, rope: RopeTable,
    workspace_on: Workspaces = _SHARED,
) -> Selection:  # fmt: skip
    """As reference.index.index_topk. Launches that overlap in time must have each a workspace of its own."""
    if pages.are_records and spec.mixing is not None:
        return of_records(queries, projected, spec, spec.mixing, ragged, pages, rope, workspace_on)
    return index.index_topk(queries, projected, spec, ragged, pages, rope, top_k)


def _gated(logits: Tensor, spec: GateSpec, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    chosen = torch.empty(len(logits), spec.topk, dtype=torch.int32, device=logits.device)
    weights = torch.empty_like(chosen, dtype=torch.float32)
    gate_kernel.gate(spec, GateOperands(logits, bias), chosen, weights)
    return chosen, weights
