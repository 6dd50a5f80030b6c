"""One attention block of V4.1: publish entries, choose among them, attend. Knows layers; owns no cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.cache.pool import CachePool
from engine.cache.records.blocks import ENTRY_FP4, INDEX_FP4, WINDOW_FP8, BlockFormat
from engine.families.v41.config import V41Config
from engine.families.v41.layout import WINDOW, entry_group, index_group, open_group
from engine.families.v41.options import Options
from engine.families.v41.schedule import Role
from engine.families.v41.weights import ChooserWeights, Layer, SourceWeights
from kernels import Ops
from kernels.csa2 import Csa2Ops
from kernels.operands import Ragged, RopeTable, Selection
from kernels.staging import staged


@dataclass(frozen=True, slots=True)
class Shared:
    """What layers of one forward hand upwards: the newest selection and candidate blocks, of the rows in play."""

    selection: Selection | None = None
    candidates: Selection | None = None


@dataclass(frozen=True, slots=True)
class Keys:
    """Window keys of this batch, and the projections that its queries start from."""

    fresh: torch.Tensor  # [rows, head_dim] in the cache's type, or fp32 where it holds records
    latent: torch.Tensor  # [rows, query_rank]
    projected: torch.Tensor

    def of(self, kept: torch.Tensor) -> Keys:
        """All keys, the queries of the kept rows."""
        return Keys(self.fresh, self.latent[kept], self.projected[kept])


class Attention:
    """The attention of every layer, in two steps, so that rows can be dropped between keys and queries."""

    def __init__(self, config: V41Config, options: Options, ops: Ops, csa2: Csa2Ops, kv_dtype: torch.dtype) -> None:
        self._config, self._ops, self._csa2 = config, ops, csa2
        # Records are made of fp32 and hold rounded values, and so is rounded what meets them.
        self._kv_dtype = torch.float32 if ops.records else kv_dtype
        self._rounds = options.fake_quantize and not ops.records

    def keys(self, hidden: torch.Tensor, layer: Layer, rows: Ragged, cache: CachePool, rope: RopeTable) -> Keys:
        """Project hidden [rows, hidden]; a source also writes the entries and index keys that this batch completes."""
        projected = self._ops.linear(hidden, layer.input)
        latent, keys = self._ops.latent(projected, layer.latent, rows, rope, torch.float32)
        if layer.source:
            self._publish(projected, layer.source, layer.role, rows, cache, rope)
        return Keys(self._rounded(keys, WINDOW_FP8).to(self._kv_dtype), latent, projected)

    def attend(
        self, keys: Keys, layer: Layer, index: int, rows: Ragged, cache: CachePool, rope: RopeTable, shared: Shared
    ) -> tuple[torch.Tensor, Shared]:
        """The rows' block output [rows, hidden], and what layers above share. `store` comes after: the ring is read."""
        ops, role = self._ops, layer.role
        if layer.chooser:
            shared = self._choose(keys, layer.chooser, role, rows, cache, rope, shared)
        pages = cache.pages(entry_group(role.ratio), role.place) if role.ratio else None
        selection = shared.selection if pages else None
        queries = ops.linear(keys.latent, layer.query)
        ring = cache.ring(WINDOW, index)
        mixed = ops.attend(queries, keys.fresh, layer.attention, rows, ring, pages, selection, rope)
        return ops.linear(ops.linear(mixed, layer.output_down), layer.output_up), shared

    def store(self, keys: Keys, index: int, rows: Ragged, cache: CachePool) -> None:
        """Keep the newest window keys; `rows` are those that the keys were computed for."""
        self._ops.store_rows(keys.fresh, 0, rows, cache.ring(WINDOW, index))

    def _publish(
        self, projected: torch.Tensor, source: SourceWeights, role: Role, rows: Ragged, cache: CachePool,
        rope: RopeTable,
    ) -> None:  # fmt: skip
        csa2, ratio = self._csa2, role.ratio
        latent = csa2.pool(
            projected, source.pool, rows, cache.ring(open_group(ratio), role.place) if ratio > 1 else None
        )
        if not len(latent):
            return
        at = _on(rows, latent.device, ratio)
        entries = csa2.rotate_heads(latent, self._config.head_dim, at, rope)
        normed = csa2.norm(self._ops.linear(latent, source.key), source.key_norm, self._config.norm_eps)
        keys = csa2.rotate_heads(normed, self._config.index_dim, at, rope)
        csa2.store_entries(self._rounded(entries, ENTRY_FP4), rows, cache.pages(entry_group(ratio), role.place))
        csa2.store_entries(self._rounded(keys, INDEX_FP4), rows, cache.pages(index_group(ratio), role.place))

    def _choose(
        self, keys: Keys, chooser: ChooserWeights, role: Role, rows: Ragged, cache: CachePool, rope: RopeTable,
        shared: Shared,
    ) -> Shared:  # fmt: skip
        width, choice, column = self._config.index_dim, chooser.choice, chooser.weight_column
        turned = self._csa2.rotate_heads(
            self._ops.linear(keys.latent, chooser.query), width, _on(rows, rope.cos.device), rope
        )
        queries = self._rounded(turned.view(len(turned), -1, width), INDEX_FP4).flatten(1)
        weights = keys.projected[:, column : column + choice.heads].contiguous()
        candidates = shared.candidates if role.restricted else None
        pages = cache.pages(index_group(role.ratio), role.place)
        selection, proposed = self._csa2.choose(queries, weights, choice, rows, pages, candidates)
        return Shared(selection, proposed or shared.candidates)

    def _rounded(self, values: torch.Tensor, format: BlockFormat) -> torch.Tensor:
        return format.rounded(values) if self._rounds else values


def _on(rows: Ragged, device: torch.device, ratio: int = 0) -> np.ndarray | torch.Tensor:
    """Positions of the rows, or with `ratio` those of the windows they complete, where `device` reads them."""
    if device.type == "cpu":
        return rows.windows[ratio].window * ratio if ratio else rows.positions
    on = staged(rows, device)
    return on.windows[ratio][1] * ratio if ratio else on.positions
