"""The multi-token prediction blocks of V3 and V3.2 as a draft: a MoE layer over a hidden state and the token after it.

Row t joins the model's normed hidden state of position t with token t + 1 and guesses token t + 2. It is cached at
position t: only distances between positions matter to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from engine.families.draft import Drafted, chosen_block, states_of
from engine.families.mla.layout import draft_layout
from kernels import Ops
from kernels.staging import tokens_of

if TYPE_CHECKING:
    from engine.families.mla.model import Mla


class MlaDraft:
    """The draft of a loaded model (engine.families.draft.Draft); hidden states are [rows, hidden]."""

    def __init__(self, model: Mla, ops: Ops) -> None:
        self.blocks = len(model.weights.mtp)
        self.layout = draft_layout(model.layout, self.blocks)
        self._model, self._ops = model, ops

    @torch.inference_mode()
    def follow(self, batch: RaggedBatch, cache: CachePool) -> Drafted:
        """The model's own forward, with the normed hidden states of every row."""
        hidden = self._model.normed(self._model.trunk(batch, cache))
        return Drafted(self._ops.linear(hidden[_wanted(batch)], self._model.weights.logits), hidden)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, hidden: torch.Tensor, cache: CachePool, depth: int = 0) -> Drafted:
        """As engine.families.draft.Draft.forward; the hidden states it returns are not normed."""
        ops, eps = self._ops, self._model.config.norm_eps
        step, hidden = self._model.begin(batch, cache), states_of(batch, hidden)
        index = chosen_block(self.blocks, depth)
        block = self._model.weights.mtp[index]
        embedded = block.embedding[tokens_of(step.rows, ops.device)].to(torch.float32)
        halves = [ops.norm(embedded, block.embedding_norm, eps), ops.norm(hidden, block.hidden_norm, eps)]
        x = self._model.run(ops.linear(torch.cat(halves, 1), block.join), block.layer, index, step)
        return Drafted(ops.linear(ops.norm(x[_wanted(batch)], block.norm, eps), block.logits), x)


def _wanted(batch: RaggedBatch) -> torch.Tensor:
    return torch.from_numpy(np.asarray(batch.logit_rows, np.int64))
