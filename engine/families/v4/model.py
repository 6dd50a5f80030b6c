"""V4's forward over paged caches: any mixture of prefill chunks and decode steps. Knows layers; owns no cache."""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from engine.checkpoint.folder import Folder
from engine.checkpoint.reader import Progress, Reader
from engine.families.replay import is_over
from engine.families.v4.config import LayerKind, V4Config, parse
from engine.families.v4.layer import Layers, Place, Step
from engine.families.v4.layout import record_layout, v4_layout
from engine.families.v4.mtp import V4Draft
from engine.families.v4.names import upstream
from engine.families.v4.options import Options, index_mixing, parse_options
from engine.families.v4.ragged import check, rows_of
from engine.families.v4.rounding import Rounding
from engine.families.v4.weights import V4Weights, build
from kernels import Ops
from kernels.operands import Ragged


def load(
    folder: Folder, dtype: torch.dtype, batch_invariant: bool, ops: Ops, block_tokens: int, progress: Progress | None
) -> V4:
    """Build the model from a folder; raises CheckpointError, naming file and tensor, for what cannot be served.

    `batch_invariant` asks for nothing here: every operator of V4 has one form, which the kernels make invariant.
    """
    config = parse(folder.config)
    options = parse_options(folder.config, config)
    mixing = index_mixing(config, options, ops)
    weights = build(Reader(folder, upstream, progress, ops.device), config, ops, dtype, mixing)
    return V4(config, options, weights, dtype, ops, block_tokens)


class V4:
    """A loaded DeepSeek-V4. Its only state besides the weights are rotary tables, which grow."""

    name = "deepseek_v4"

    def __init__(
        self, config: V4Config, options: Options, weights: V4Weights, dtype: torch.dtype, ops: Ops, block_tokens: int
    ) -> None:
        self.config, self.options, self.weights, self.kernels = config, options, weights, ops.name
        if ops.records:
            self.layout = record_layout(config, block_tokens, options.power_scales)
        else:
            self.layout = v4_layout(config, str(dtype).removeprefix("torch."), block_tokens, mark=options.mark)
        self.vocab_size, self.max_context_tokens = config.vocab_size, config.max_context_tokens
        self.eos_token_ids = config.eos_token_ids
        self.captures = ops.captures and (ops.records or not options.fake_quantize)
        self._ops, self._places = ops, _places(config.layers)
        rounds = options.fake_quantize and not ops.records  # records have their values rounded
        self._layers = Layers(config, ops, dtype, Rounding(config, ops) if rounds else None)
        self.draft = V4Draft(self, self._layers, ops) if weights.mtp else None

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, cache: CachePool) -> torch.Tensor:
        """Logits fp32 [len(batch.logit_rows), vocabulary]; writes every new record into `cache`.

        Exact for any chunking, and with `batch.replay` a function of it and the tokens for any chunking. Raises
        ValueError for a batch that does not fit the cache.
        """
        return self.logits(self.streams(batch, cache), batch)

    def streams(self, batch: RaggedBatch, cache: CachePool) -> torch.Tensor:
        """The residual streams behind the last layer, fp32 [rows, streams, hidden]; writes and raises as `forward`."""
        rows = self.plan(batch, cache)
        self._ops.begin()
        return self._through(self._layers.begin(rows, cache))

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """As kernels.likeliest.likeliest."""
        return self._ops.likeliest(logits)

    def decodes(self, batch: RaggedBatch) -> bool:
        """As engine.graphs.Decodes.decodes."""
        return is_over(batch.replay, batch)

    def plan(self, batch: RaggedBatch, cache: CachePool) -> Ragged:
        """As engine.graphs.Decodes.plan."""
        check(batch, cache, self.vocab_size, self.max_context_tokens)
        return rows_of(batch, self.config.rates)

    @torch.inference_mode()
    def decode(self, rows: Ragged, cache: CachePool) -> torch.Tensor:
        """As engine.graphs.Decodes.decode."""
        streams = self._through(self._layers.begin(rows, cache, self.max_context_tokens))
        return self._ops.linear(self._ops.hyper_head(streams, self.weights.head), self.weights.logits)

    def _through(self, step: Step) -> torch.Tensor:
        embedded = self.weights.embedding[step.tokens].to(torch.float32)
        x = embedded[:, None].repeat(1, self.config.streams, 1)
        for layer, place in zip(self.weights.layers, self._places, strict=True):
            x = self._layers.run(x, layer, place, step)
        return x

    def logits(self, streams: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        """Logits of the rows that the batch asks for."""
        wanted = streams[torch.from_numpy(np.asarray(batch.logit_rows, np.int64))]
        if not len(wanted):
            return streams.new_empty(0, self.vocab_size)
        return self._ops.linear(self._ops.hyper_head(wanted, self.weights.head), self.weights.logits)


def _places(layers: tuple[LayerKind, ...]) -> tuple[Place, ...]:
    """Each layer's number among all, and among the layers of its kind."""
    return tuple(Place(i, layers[:i].count(kind)) for i, kind in enumerate(layers))
