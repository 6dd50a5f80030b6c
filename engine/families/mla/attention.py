"""One latent attention block: caches its rows, selects if it is sparse, and attends in the form each sequence has."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.cache.pool import CachePool
from engine.families.mla.build import LATENT_EPS
from engine.families.mla.forms import Forms
from engine.families.mla.layout import INDEX_KEY, INDEX_SCALE
from engine.families.mla.weights import Layer
from engine.families.rounding import IndexRounding
from kernels import Ops
from kernels.operands import MlaSpec, Pages, Ragged, RopeTable, Selection, Weights


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of one forward share."""

    rows: Ragged
    forms: Forms
    cache: CachePool
    rope: RopeTable


class Attention:
    """Stateless: layers and caches are arguments."""

    def __init__(self, ops: Ops, index_rounding: IndexRounding | None = None) -> None:
        """With `index_rounding` the indexer's keys and queries are rounded before they are scored."""
        self._ops, self._index_rounding = ops, index_rounding

    def run(self, x: torch.Tensor, layer: Layer, index: int, step: Step, norm_eps: float) -> torch.Tensor:
        """[rows, hidden], normed here -> [rows, hidden]; `index` is the layer's place in the cache groups."""
        ops, spec, pages = self._ops, layer.attention, step.cache.pages("latent", index)
        projected = self._norm_linear(x, layer.attention_norm, norm_eps, layer.input)
        ops.store_latent(projected, spec, step.rows, pages, step.rope)
        queries = self._queries(projected, layer)
        selection = self._select(projected, queries, layer, index, step)
        rest = torch.from_numpy(step.forms.rows)
        if not step.forms.expanded:
            mixed = self._absorbed(queries, spec, step.rows, pages, selection, step.rope)
            return ops.linear(mixed, layer.output)
        mixed = x.new_empty(len(x), spec.heads * spec.value)
        if len(rest):
            chosen = Selection(selection.entries[rest], selection.counts[rest]) if selection else None
            mixed[rest] = self._absorbed(queries[rest], spec, step.forms.rest, pages, chosen, step.rope)
        for s in step.forms.expanded:
            first, end = int(step.rows.starts[s]), int(step.rows.starts[s + 1])
            mixed[first:end] = self._expanded(queries[first:end], spec, s, step, pages, selection)
        return ops.linear(mixed, layer.output)

    def _queries(self, projected: torch.Tensor, layer: Layer) -> torch.Tensor:
        """[rows, heads * nope | heads * rope | the indexer's heads]."""
        if layer.query_norm is None or layer.query is None:
            return projected
        rank = layer.query_norm.shape[0]
        return self._norm_linear(projected[:, :rank], layer.query_norm, LATENT_EPS, layer.query)

    def _norm_linear(self, x: torch.Tensor, norm: torch.Tensor, eps: float, weight: Weights) -> torch.Tensor:
        """The product of the norm of x."""
        given = x if self._ops.apart else x.contiguous()
        if self._ops.norm_linear is not None:
            return self._ops.norm_linear(given, norm, eps, weight)
        return self._ops.linear(self._ops.norm(given, norm, eps), weight)

    def _select(
        self, projected: torch.Tensor, queries: torch.Tensor, layer: Layer, index: int, step: Step
    ) -> Selection | None:
        """Write the indexer's keys and choose what each row attends; None: all of it."""
        if layer.indexer is None or layer.index_key is None:
            return None
        keys = step.cache.pages(INDEX_KEY, index)
        if keys.are_records:
            keys = replace(keys, scales=step.cache.pages(INDEX_SCALE, index))
        self._ops.store_index_key(projected, layer.index_key, step.rows, keys, step.rope)
        if self._index_rounding:
            self._index_rounding.entries(step.rows, keys)
            return self._index_rounding.choose(queries, projected, layer.indexer, step.rows, keys, step.rope)
        return self._ops.index_topk(queries, projected, layer.indexer, step.rows, keys, step.rope)

    def _absorbed(
        self, queries: torch.Tensor, spec: MlaSpec, rows: Ragged, pages: Pages, selection: Selection | None,
        rope: RopeTable,
    ) -> torch.Tensor:  # fmt: skip
        """Queries go to the latent, latents are mixed, and the mixture comes back: [rows, heads * value]."""
        still, end = spec.heads * spec.nope, spec.heads * (spec.nope + spec.rope)
        asked, turning = queries[:, :still], queries[:, still:end]
        if not self._ops.apart:
            asked, turning = asked.contiguous(), turning.contiguous()
        absorbed = self._ops.linear(asked, spec.absorb)
        mixed = self._ops.attend_latent(absorbed, turning, spec, rows, pages, selection, rope)
        return self._ops.linear(mixed, spec.output)

    def _expanded(
        self, queries: torch.Tensor, spec: MlaSpec, s: int, step: Step, pages: Pages, selection: Selection | None
    ) -> torch.Tensor:
        """One sequence's rows over its latents, expanded to every head's own keys and values."""
        first, end, context = int(step.rows.starts[s]), int(step.rows.starts[s + 1]), int(step.rows.context[s])
        cached = self._ops.read_rows(s, step.rows, pages, context + end - first)
        expanded = self._ops.linear(cached[:, : spec.rank].contiguous(), spec.expand)
        positions = range(context, context + end - first)
        chosen = None if selection is None else _mask(selection, first, end, len(cached))
        heads = queries[:, : spec.heads * (spec.nope + spec.rope)]
        return self._ops.attend_expanded(heads, expanded, cached[:, spec.rank :], spec, positions, chosen, step.rope)


def _mask(selection: Selection, first: int, end: int, keys: int) -> torch.Tensor:
    """The selection of rows first .. end as bool [rows, keys]."""
    entries, counts = selection.entries[first:end], selection.counts[first:end]
    valid = torch.arange(entries.shape[1], device=entries.device) < counts[:, None]
    # Places beyond a row's count hold anything; they all point one past the end, which is cut off.
    mask = torch.zeros(end - first, keys + 1, dtype=torch.bool, device=entries.device)
    mask.scatter_(1, entries.long().where(valid, keys), True)
    return mask[:, :keys].contiguous()
