"""V4's forward over paged caches: any mixture of prefill chunks and decode steps. Knows layers; owns no cache."""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from engine.checkpoint.folder import Folder
from engine.checkpoint.reader import Progress, Reader
from engine.families.v4.config import LayerKind, V4Config, parse
from engine.families.v4.layout import v4_layout
from engine.families.v4.names import upstream
from engine.families.v4.ragged import check, ragged
from engine.families.v4.rope import GrowingRope
from engine.families.v4.weights import Layer, V4Weights, build
from kernels import Ops
from kernels.operands import Pages, Ragged, RopeTable, Selection


def load(
    folder: Folder, dtype: torch.dtype, batch_invariant: bool, ops: Ops, block_tokens: int, progress: Progress | None
) -> V4:
    """Build the model from a folder; raises CheckpointError, naming file and tensor, for what cannot be served.

    `batch_invariant` asks for nothing here: every operator of V4 has one form, which the kernels make invariant.
    """
    config = parse(folder.config)
    return V4(config, build(Reader(folder, upstream, progress), config, ops, dtype), dtype, ops, block_tokens)


class V4:
    """A loaded DeepSeek-V4. Its only state besides the weights are rotary tables, which grow."""

    name = "deepseek_v4"

    def __init__(self, config: V4Config, weights: V4Weights, dtype: torch.dtype, ops: Ops, block_tokens: int) -> None:
        self.config, self.weights, self.kernels = config, weights, ops.name
        self.layout = v4_layout(config, str(dtype).removeprefix("torch."), block_tokens)
        self.vocab_size, self.max_context_tokens = config.vocab_size, config.max_context_tokens
        self.eos_token_ids = config.eos_token_ids
        self._ops, self._kv_dtype = ops, dtype
        self._main = GrowingRope(config.main_rope, config.rope_dim)
        self._compressed = GrowingRope(config.compress_rope, config.rope_dim)
        self._place = _places(config.layers)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, cache: CachePool) -> torch.Tensor:
        """Logits fp32 [len(batch.logit_rows), vocabulary]; writes every new record into `cache`.

        Exact for any chunking. Raises ValueError for a batch that does not fit the cache.
        """
        check(batch, cache, self.vocab_size, self.max_context_tokens)
        self._ops.begin()
        rows = ragged(batch, self.config.rates)
        tokens = torch.from_numpy(rows.tokens)
        last = int(np.max(rows.positions)) + 1
        tables = {kind: (self._compressed if self.config.rate(kind) else self._main).upto(last) for kind in LayerKind}
        embedded = self.weights.embedding[tokens].to(torch.float32)
        x = embedded[:, None].repeat(1, self.config.streams, 1)
        for i, layer in enumerate(self.weights.layers):
            hidden, post, comb = self._ops.hyper_pre(x, layer.attention_site)
            x = self._ops.hyper_post(x, self._attention(hidden, layer, i, rows, cache, tables[layer.kind]), post, comb)
            hidden, post, comb = self._ops.hyper_pre(x, layer.mlp_site)
            chosen, weights = self._ops.route(hidden, tokens, layer.router)
            x = self._ops.hyper_post(x, self._ops.experts(hidden, chosen, weights, layer.experts), post, comb)
        wanted = x[torch.from_numpy(np.asarray(batch.logit_rows, np.int64))]
        return self._ops.linear(self._ops.hyper_head(wanted, self.weights.head), self.weights.logits)

    def _attention(
        self, hidden: torch.Tensor, layer: Layer, index: int, rows: Ragged, cache: CachePool, rope: RopeTable
    ) -> torch.Tensor:
        """One attention block [rows, hidden] -> [rows, hidden]."""
        ops, window = self._ops, cache.ring("window", index)
        projected = ops.linear(hidden, layer.input)
        latent, keys = ops.latent(projected, layer.latent, rows, rope, self._kv_dtype)
        queries = ops.linear(latent, layer.query)
        pages, selection = self._compress(projected, queries, layer, self._place[index], rows, cache, rope)
        mixed = ops.attend(queries, keys, layer.attention, rows, window, pages, selection, rope)
        # Only now: until here rows of this chunk needed what the ring held before it.
        ops.store_rows(keys, 0, rows, window)
        return ops.linear(ops.linear(mixed, layer.output_down), layer.output_up)

    def _compress(
        self, projected: torch.Tensor, queries: torch.Tensor, layer: Layer, place: int, rows: Ragged,
        cache: CachePool, rope: RopeTable,
    ) -> tuple[Pages | None, Selection | None]:  # fmt: skip
        """Write the entries this batch finishes; which pages the layer reads, and which entries of them (None: all)."""
        if layer.compressor is None:
            return None, None
        group = "hca" if layer.indexer is None else "csa"
        pages = cache.pages(group, place)
        self._ops.compress(projected, layer.compressor, rows, cache.ring(f"{group}_state", place), pages, rope)
        if layer.indexer is None or layer.index_compressor is None:
            return pages, None
        keys = cache.pages("csa_index", place)
        ring = cache.ring("csa_index_state", place)
        self._ops.compress(projected, layer.index_compressor, rows, ring, keys, rope)
        return pages, self._ops.index_topk(queries, projected, layer.indexer, rows, keys, rope)


def _places(layers: tuple[LayerKind, ...]) -> tuple[int, ...]:
    """Each layer's number among the layers of its kind: its place in that kind's cache groups."""
    return tuple(layers[:i].count(kind) for i, kind in enumerate(layers))
