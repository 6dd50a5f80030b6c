"""The forward of V2, V3 and V3.2 over paged caches: any mixture of prefill chunks and decode steps. Owns no cache."""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from engine.checkpoint.folder import Folder
from engine.checkpoint.reader import Progress, Reader
from engine.families.mla.attention import Attention, Step
from engine.families.mla.build import build
from engine.families.mla.config import MlaConfig, parse
from engine.families.mla.forms import alone, forms
from engine.families.mla.layout import mla_layout, record_layout
from engine.families.mla.mtp import MlaDraft
from engine.families.mla.names import upstream
from engine.families.mla.options import Options, index_mixing, index_rounding, parse_options
from engine.families.mla.weights import Layer, MlaWeights
from engine.families.rotary import GrowingRope
from engine.families.v4.ragged import check, ragged
from kernels import Ops
from kernels.operands import Ragged
from kernels.staging import tokens_of


def load(
    folder: Folder, dtype: torch.dtype, batch_invariant: bool, ops: Ops, block_tokens: int, progress: Progress | None
) -> Mla:
    """Build the model from a folder; raises CheckpointError, naming file and tensor, for what cannot be served.

    With `batch_invariant`, and over records, attention has the absorbed form alone: no bit then depends on how tokens
    are cut, and records are read where they lie.
    """
    config = parse(folder.config)
    expandable = not (batch_invariant or ops.records) and ops.expands(config.latent_rank, config.rope, dtype)
    options = parse_options(folder.config, config)
    mixing = index_mixing(config, options, ops)
    weights = build(Reader(folder, upstream, progress, ops.device), config, ops, dtype, expandable, mixing)
    return Mla(config, options, weights, dtype, ops, block_tokens, expandable)


class Mla:
    """A loaded model. Its only state besides the weights is the rotary table, which grows."""

    def __init__(
        self, config: MlaConfig, options: Options, weights: MlaWeights, dtype: torch.dtype, ops: Ops,
        block_tokens: int, expandable: bool,
    ) -> None:  # fmt: skip
        self.name, self.config, self.options, self.weights = config.model_type, config, options, weights
        self.kernels = ops.name
        if ops.records:
            self.layout = record_layout(config, block_tokens, options.power_scales)
        else:
            self.layout = mla_layout(config, str(dtype).removeprefix("torch."), block_tokens, options.mark)
        self.vocab_size, self.max_context_tokens = config.vocab_size, config.max_context_tokens
        self.eos_token_ids = config.eos_token_ids
        self.captures = ops.captures and (ops.records or not options.fp8_index_scores)
        self._ops, self._expandable = ops, expandable
        self._rotary = GrowingRope(config.rotary.rope, config.rope, config.rotary.amplitude, ops.device)
        self._attention = Attention(ops, index_rounding(config, options, ops))
        self.draft = MlaDraft(self, ops) if weights.mtp else None

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, cache: CachePool) -> torch.Tensor:
        """Logits fp32 [len(batch.logit_rows), vocabulary]; writes every new record into `cache`.

        Exact for any chunking. Raises ValueError for a batch that does not fit the cache.
        """
        step, last = self.begin(batch, cache), len(self.weights.layers) - 1
        x = self._last(self._through(last, step), np.asarray(batch.logit_rows, np.int64), last, step)
        return self._ops.linear(self.normed(x), self.weights.logits)

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """As kernels.likeliest.likeliest."""
        return self._ops.likeliest(logits)

    def decodes(self, batch: RaggedBatch) -> bool:
        """As engine.graphs.Decodes.decodes."""
        return batch.replay is None

    def plan(self, batch: RaggedBatch, cache: CachePool) -> Ragged:
        """As engine.graphs.Decodes.plan."""
        check(batch, cache, self.vocab_size, self.max_context_tokens)
        return ragged(batch, ())

    @torch.inference_mode()
    def decode(self, rows: Ragged, cache: CachePool) -> torch.Tensor:
        """As engine.graphs.Decodes.decode. The rotary table is made whole, for a graph remembers where it is."""
        rope = self._rotary.upto(self.max_context_tokens)
        step = Step(rows, forms(self.config, rows, expandable=False), cache, rope)
        return self._ops.linear(self.normed(self._through(len(self.weights.layers), step)), self.weights.logits)

    def trunk(self, batch: RaggedBatch, cache: CachePool) -> torch.Tensor:
        """Hidden states of all rows before the last norm, fp32 [rows, hidden]; writes and raises as `forward`."""
        return self._through(len(self.weights.layers), self.begin(batch, cache))

    def _through(self, layers: int, step: Step) -> torch.Tensor:
        """Embeddings of all rows behind the first `layers` layers."""
        x = self.weights.embedding[tokens_of(step.rows, self._ops.device)].to(torch.float32)
        for i, layer in enumerate(self.weights.layers[:layers]):
            x = self.run(x, layer, i, step)
        return x

    def _last(self, x: torch.Tensor, wanted: np.ndarray, index: int, step: Step) -> torch.Tensor:
        """The last layer for the rows `wanted` alone: of the others nothing but their cached rows is ever read."""
        ops, layer, eps = self._ops, self.weights.layers[index], self.config.norm_eps
        if layer.indexer is not None or 2 * len(wanted) > len(x):
            return self.run(x, layer, index, step)[torch.from_numpy(wanted)]
        pages = step.cache.pages("latent", index)
        projected = ops.linear(ops.norm(x, layer.attention_norm, eps), layer.input)
        ops.store_latent(projected, layer.attention, step.rows, pages, step.rope)
        x = x[torch.from_numpy(wanted)]
        return ops.mla_layer(x, layer.whole(eps), alone(step.rows, wanted), pages, step.rope) if len(x) else x

    def begin(self, batch: RaggedBatch, cache: CachePool) -> Step:
        """What all layers of one forward share. Raises ValueError for a batch that does not fit the cache."""
        rows = self.plan(batch, cache)
        self._ops.begin()
        rope = self._rotary.upto(int(np.max(rows.positions)) + 1)
        return Step(rows, forms(self.config, rows, self._expandable), cache, rope)

    def run(self, x: torch.Tensor, layer: Layer, index: int, step: Step) -> torch.Tensor:
        """One layer [rows, hidden] -> [rows, hidden]; `index` is its place in the cache groups."""
        ops, eps = self._ops, self.config.norm_eps
        if layer.indexer is None and not step.forms.expanded:
            return ops.mla_layer(x, layer.whole(eps), step.rows, step.cache.pages("latent", index), step.rope)
        attended = self._attention.run(x, layer, index, step, eps)
        if ops.after_attention is not None:
            return ops.after_attention(x, attended, layer.whole(eps))
        x = x + attended
        return x + self._mlp(ops.norm(x, layer.mlp_norm, eps), layer)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """The last norm."""
        return self._ops.norm(x, self.weights.norm, self.config.norm_eps)

    def _mlp(self, hidden: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Experts, or the one expert of a dense layer: [rows, hidden] -> [rows, hidden]."""
        if layer.router is None:
            rows = hidden.shape[0]
            chosen, weights = hidden.new_empty(rows, 0, dtype=torch.int32), hidden.new_empty(rows, 0)
        else:
            chosen, weights = self._ops.route_groups(hidden, layer.router)
        return self._ops.experts(hidden, chosen, weights, layer.experts)
