"""V4's multi-token prediction blocks as a draft: one sliding layer over the model's streams and the token after each.

Row t joins the model's streams of position t with token t + 1 and guesses token t + 2. It is cached at position t:
only distances between positions matter to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from engine.families.draft import Drafted, chosen_block, states_of
from engine.families.v4.layer import Layers, Place, Step
from engine.families.v4.layout import draft_layout
from engine.families.v4.ragged import check, rows_of
from engine.families.v4.weights import MtpBlock
from kernels import Ops

if TYPE_CHECKING:
    from engine.families.v4.model import V4


class V4Draft:
    """The draft of a loaded V4 (engine.families.draft.Draft); hidden states are streams [rows, streams, hidden]."""

    def __init__(self, model: V4, layers: Layers, ops: Ops) -> None:
        self.blocks = len(model.weights.mtp)
        self.layout = draft_layout(model.layout, self.blocks)
        self._model, self._layers, self._ops = model, layers, ops

    @torch.inference_mode()
    def follow(self, batch: RaggedBatch, cache: CachePool) -> Drafted:
        """The model's own forward, with the streams of every row."""
        streams = self._model.streams(batch, cache)
        return Drafted(self._model.logits(streams, batch), streams)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, hidden: torch.Tensor, cache: CachePool, depth: int = 0) -> Drafted:
        """As engine.families.draft.Draft.forward."""
        check(batch, cache, self._model.vocab_size, self._model.max_context_tokens)
        hidden = states_of(batch, hidden)
        self._ops.begin()
        index = chosen_block(self.blocks, depth)
        block, step = self._model.weights.mtp[index], self._layers.begin(rows_of(batch, ()), cache)
        x = self._layers.run(self._joined(block, hidden, step), block.layer, Place(index), step)
        wanted = x[torch.from_numpy(np.asarray(batch.logit_rows, np.int64))]
        return Drafted(self._ops.linear(self._ops.hyper_head(wanted, block.head), self._model.weights.logits), x)

    def _joined(self, block: MtpBlock, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """Every stream, normed and projected, plus the projected embedding: [rows, streams, hidden]."""
        ops, eps = self._ops, self._model.config.norm_eps
        embedded = self._model.weights.embedding[step.tokens].to(torch.float32)
        token = ops.linear(ops.norm(embedded, block.embedding_norm, eps), block.embedding_in)
        streams = ops.linear(ops.norm(hidden.flatten(0, 1), block.hidden_norm, eps), block.hidden_in)
        return streams.view(hidden.shape) + token[:, None]
