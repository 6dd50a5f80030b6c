"""A whole layer of latent attention and experts in two compiled calls: nothing of a decode step runs in Python."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel, serial
from kernels.cpu.experts import expert_rows
from kernels.cpu.linear import product
from kernels.cpu.mla import NO_COUNTS, NO_ENTRIES, attend
from kernels.cpu.mla_rows import norm_rows, store_latent_rows
from kernels.cpu.numbers import round_bf16
from kernels.cpu.route_groups import route_rows
from kernels.operands import GroupRouterSpec, MlaLayer, Pages, Ragged, RopeTable

_NO_NORM = np.zeros(0, np.float32)
_NO_ROUTER = GroupRouterSpec(None, None, 0, 0, 1, 1, 1, True, False, 1.0, 0)


def mla_layer(x: torch.Tensor, layer: MlaLayer, ragged: Ragged, pages: Pages, rope: RopeTable) -> torch.Tensor:
    """As reference.mla_layer.mla_layer."""
    out, given, spec, bank = torch.empty_like(x), x.numpy(), layer.attention, layer.experts
    _attention(
        given, layer.attention_norm.numpy(), layer.norm_eps, layer.input.array,
        _NO_NORM if layer.query_norm is None else layer.query_norm.numpy(), (layer.query or layer.input).array,
        spec.heads, spec.nope, spec.value, spec.column, spec.norm.numpy(), spec.norm_eps, spec.scale,
        spec.absorb.array, spec.output.array, layer.output.array, layer.input.rounds, ragged.positions,
        ragged.sequences, ragged.tables, pages.array, pages.offset, pages.entries, rope.cos.numpy(), rope.sin.numpy(),
        NO_ENTRIES, NO_COUNTS, out.numpy(),
    )  # fmt: skip
    router = layer.router or _NO_ROUTER
    _experts(
        out.numpy(), layer.mlp_norm.numpy(), layer.norm_eps, (router.gate or bank.gate).array,
        np.zeros(router.experts, np.float32) if router.bias is None else router.bias.numpy(), router.topk,
        router.always, router.groups, router.kept_groups, router.group_best, router.sigmoid, router.normalize,
        router.scaling, bank.gate.array, bank.up.array, bank.down.array, bank.experts, bank.inner, bank.limit,
        bank.gate.rounds,
    )  # fmt: skip
    return out


@parallel
def _round(x: Array, width: int) -> None:
    """The first `width` columns of x to the nearest bf16 values."""
    for row in prange(x.shape[0]):
        part = x[row, :width]
        for c in range(width):
            part[c] = round_bf16(part[c])


@parallel
def _sum(x: Array, y: Array, out: Array) -> None:
    for row in prange(x.shape[0]):
        for c in range(x.shape[1]):
            out[row, c] = x[row, c] + y[row, c]


@serial
def _attention(
    x: Array, norm: Array, eps: float, entrance: Array, query_norm: Array, query: Array, heads: int, nope: int,
    value: int, column: int, latent_norm: Array, latent_eps: float, scale: float, absorb: Array, output: Array,
    leaving: Array, rounds: bool, positions: Array, sequences: Array, tables: Array, pages: Array, offset: int,
    per_page: int, cosine: Array, sine: Array, entries: Array, counts: Array, out: Array,
) -> None:  # fmt: skip
    """out = x + attention(norm(x)), its rows cached."""
    (rows, hidden), rank, rope = x.shape, len(latent_norm), 2 * cosine.shape[1]
    normed = np.empty((rows, hidden), np.float32)
    norm_rows(x, 0, norm, eps, normed)
    if rounds:
        _round(normed, hidden)
    projected = np.empty((rows, column + rank + rope), np.float32)
    product(normed, 0, entrance, 1, column + rank + rope, projected)
    store_latent_rows(
        projected, column, latent_norm, latent_eps, positions, sequences, tables, pages, offset, per_page, cosine, sine
    )
    queries = projected
    if len(query_norm) > 0:
        narrow = np.empty((rows, len(query_norm)), np.float32)
        norm_rows(projected, 0, query_norm, latent_eps, narrow)
        if rounds:
            _round(narrow, len(query_norm))
        queries = np.empty((rows, heads * (nope + rope)), np.float32)
        product(narrow, 0, query, 1, heads * (nope + rope), queries)
    if rounds:
        _round(queries, heads * nope)
    absorbed, mixed = np.empty((rows, heads * rank), np.float32), np.empty((rows, heads * rank), np.float32)
    product(queries, 0, absorb, heads, rank, absorbed)
    attend(
        absorbed, queries, heads * nope, heads, rank, scale, positions, sequences, tables, pages, offset, per_page,
        entries, counts, cosine, sine, mixed,
    )  # fmt: skip
    values = np.empty((rows, heads * value), np.float32)
    if rounds:
        _round(mixed, heads * rank)
    product(mixed, 0, output, heads, value, values)
    if rounds:
        _round(values, heads * value)
    product(values, 0, leaving, 1, hidden, normed)
    _sum(x, normed, out)


@serial
def _experts(
    x: Array, norm: Array, eps: float, router: Array, bias: Array, topk: int, always: int, groups: int, kept: int,
    group_best: int, is_sigmoid: bool, normalize: bool, scaling: float, gate: Array, up: Array, down: Array,
    experts: int, inner: int, limit: float, rounds: bool,
) -> None:  # fmt: skip
    """x += experts(norm(x))."""
    normed, added = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32)
    norm_rows(x, 0, norm, eps, normed)
    chosen, weights = np.empty((len(x), topk + always), np.int32), np.empty((len(x), topk + always), np.float32)
    if topk > 0:
        route_rows(
            normed, router, bias, topk, groups, kept, group_best, is_sigmoid, normalize, scaling, chosen, weights
        )
    if rounds:
        _round(normed, x.shape[1])
    expert_rows(normed, chosen, weights, gate, up, down, experts, inner, limit, rounds, added)
    _sum(x, added, x)
