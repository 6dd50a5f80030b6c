"""A draft that comes with a model: what guesses tokens ahead, over caches of its own. Knows no family.

Nothing of it is served yet: its caches stay where they were computed, and no record of them is handed over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from engine.layout import Layout


@dataclass(frozen=True, slots=True)
class Drafted:
    """Logits fp32 [len(batch.logit_rows), vocabulary], and the hidden states fp32 [rows, ...] behind all rows."""

    logits: torch.Tensor
    hidden: torch.Tensor


class Draft(Protocol):
    """Trained blocks that guess the token after the next.

    A draft's batch is the batch of the model with each row's token replaced by the one that follows it: row t holds
    the model's hidden state of position t and token t + 1, and its logits are for token t + 2. Sequences, positions,
    blocks, slots and chunks are those of the model, over a pool of the draft's own `layout`. Rows of tokens that were
    not taken are overwritten by those that were, as in the model's cache.
    """

    layout: Layout
    blocks: int  # how many trained blocks there are, one for each further token

    def follow(self, batch: RaggedBatch, cache: CachePool) -> Drafted:
        """The forward of the model itself over its own `cache`, with the hidden states that `forward` begins from."""

    def forward(self, batch: RaggedBatch, hidden: torch.Tensor, cache: CachePool, depth: int = 0) -> Drafted:
        """Guess from `hidden`, one state for each row of the batch; writes its records into `cache`.

        To guess further, give the hidden states that it returns with the tokens that it guessed and the next `depth`;
        beyond the last trained block that block is used again. Raises ValueError for a batch that does not fit the
        cache or the states.
        """


def states_of(batch: RaggedBatch, hidden: torch.Tensor) -> torch.Tensor:
    """Contiguous fp32 states. Raises ValueError unless there is one for each row of the batch."""
    if len(hidden) != batch.rows:
        raise ValueError(f"{len(hidden)} hidden states for {batch.rows} rows")
    return hidden.to(torch.float32).contiguous()


def chosen_block(blocks: int, depth: int) -> int:
    """The block that guesses `depth` tokens beyond the first. Raises ValueError for a negative depth."""
    if depth < 0:
        raise ValueError(f"depth must not be negative, got {depth}")
    return min(depth, blocks - 1)
