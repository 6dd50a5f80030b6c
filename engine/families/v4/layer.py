"""One layer of V4 over the residual streams: attention with its caches, then experts. Knows layers; owns no cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.cache.pool import CachePool
from engine.families.rotary import GrowingRope
from engine.families.v4.config import V4Config
from engine.families.v4.layout import CSA, HCA, INDEX, SCALE, WINDOW
from engine.families.v4.rounding import Rounding
from engine.families.v4.weights import Layer
from kernels import Ops
from kernels.operands import Pages, Ragged, Ring, RopeTable, Selection
from kernels.staging import tokens_of


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer's records are: its number in the window group, and in the groups of its own kind."""

    window: int
    kind: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of one forward share."""

    rows: Ragged
    tokens: torch.Tensor  # int64 [rows] that experts are chosen by in hashed layers
    cache: CachePool
    main: RopeTable  # of layers that compress nothing
    compressed: RopeTable  # of the others


class Layers:
    """Runs layers; layers and caches are arguments. Its only state are rotary tables, which grow."""

    def __init__(self, config: V4Config, ops: Ops, kv_dtype: torch.dtype, rounding: Rounding | None) -> None:
        self._ops, self._rounding = ops, rounding
        self._kv_dtype = torch.float32 if ops.records else kv_dtype  # of window keys; records are made of fp32
        self._main = GrowingRope(config.main_rope, config.rope_dim, device=ops.device)
        self._compressed = GrowingRope(config.compress_rope, config.rope_dim, device=ops.device)

    def begin(self, rows: Ragged, cache: CachePool, positions: int | None = None) -> Step:
        """The step of one batch; the caller has checked that it fits the cache.

        `positions`: how many the rotary tables must have, where later batches are to find them in their place.
        """
        last = positions or int(np.max(rows.positions)) + 1
        return Step(rows, tokens_of(rows, self._ops.device), cache, self._main.upto(last), self._compressed.upto(last))

    def run(self, x: torch.Tensor, layer: Layer, place: Place, step: Step) -> torch.Tensor:
        """Streams [rows, streams, hidden] -> the same after the layer; writes its new records."""
        ops = self._ops
        hidden, post, comb = ops.hyper_pre(x, layer.attention_site)
        x = ops.hyper_post(x, self._attention(hidden, layer, place, step), post, comb)
        hidden, post, comb = ops.hyper_pre(x, layer.mlp_site)
        chosen, weights = ops.route(hidden, step.tokens, layer.router)
        return ops.hyper_post(x, ops.experts(hidden, chosen, weights, layer.experts), post, comb)

    def _attention(self, hidden: torch.Tensor, layer: Layer, place: Place, step: Step) -> torch.Tensor:
        """One attention block [rows, hidden] -> [rows, hidden]."""
        ops, rows, window = self._ops, step.rows, _ring(step.cache, WINDOW, place.window)
        rope = step.compressed if layer.compressor else step.main
        projected = ops.linear(hidden, layer.input)
        latent, keys = ops.latent(projected, layer.latent, rows, rope, self._kv_dtype)
        keys = self._rounding.rows(keys) if self._rounding else keys
        queries = ops.linear(latent, layer.query)
        pages, selection = self._compress(projected, queries, layer, place, step, rope)
        stored = window.takes_first(rows, layer.attention.window)
        if stored:
            ops.store_rows(keys, 0, rows, window)
        mixed = ops.attend(queries, keys, layer.attention, rows, window, pages, selection, rope)
        if not stored:  # until here rows of this chunk needed what the ring held before it
            ops.store_rows(keys, 0, rows, window)
        return ops.linear(ops.linear(mixed, layer.output_down), layer.output_up)

    def _compress(
        self, projected: torch.Tensor, queries: torch.Tensor, layer: Layer, place: Place, step: Step, rope: RopeTable
    ) -> tuple[Pages | None, Selection | None]:
        """Write the entries this batch finishes; which pages the layer reads, and which entries of them (None: all)."""
        if layer.compressor is None:
            return None, None
        ops, rows, cache, group = self._ops, step.rows, step.cache, HCA if layer.indexer is None else CSA
        pages = _pages(cache, group, place.kind)
        ops.compress(projected, layer.compressor, rows, cache.ring(f"{group}_state", place.kind), pages, rope)
        if self._rounding:
            self._rounding.entries(rows, pages)
        if layer.indexer is None or layer.index_compressor is None:
            return pages, None
        keys, ring = _pages(cache, INDEX, place.kind), cache.ring(f"{INDEX}_state", place.kind)
        ops.compress(projected, layer.index_compressor, rows, ring, keys, rope)
        if self._rounding is None:
            return pages, ops.index_topk(queries, projected, layer.indexer, rows, keys, rope)
        self._rounding.index.entries(rows, keys)
        return pages, self._rounding.index.choose(queries, projected, layer.indexer, rows, keys, rope)


def _pages(cache: CachePool, group: str, layer: int) -> Pages:
    """One layer of entries, with their scales where they are records."""
    pages = cache.pages(group, layer)
    return replace(pages, scales=cache.pages(group + SCALE, layer)) if pages.are_records else pages


def _ring(cache: CachePool, group: str, layer: int) -> Ring:
    """One layer of window rows, with their scales where they are records."""
    ring = cache.ring(group, layer)
    return replace(ring, scales=cache.ring(group + SCALE, layer)) if ring.are_records else ring
