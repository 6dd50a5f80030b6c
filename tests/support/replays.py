"""Prefix hits without window state, run on a family alone: what comes out of the rows that are computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.batch import RaggedBatch, Replay
from engine.cache.pool import CachePool
from engine.families import Family
from engine.windows import window_tokens
from tests.support.tiny import Piece, batch_of

WINDOW = 16  # tokens of the tiny models


def replaying(
    batch: RaggedBatch, tokens: Sequence[int], hit: int = 0, upper: int = 0, replayed: int = WINDOW
) -> RaggedBatch:
    """The batch, whose every sequence is `tokens`, replayed from a hit or with upper layers from `upper` on."""
    before = [[tokens[at - back] if at >= back else -1 for back in (1, 2, 3)] for at in batch.context]
    hits, uppers = (np.full(batch.sequences, value, np.int32) for value in (hit, upper))
    return replace(batch, replay=Replay(hits, np.array(before, np.int64), uppers, replayed))


def resumed_rows(
    family: Family,
    pool: CachePool,
    tokens: Sequence[int],
    hit: int,
    chunk: int,
    slot: int = 1,
    replayed: int | None = None,
) -> torch.Tensor:
    """Logits of the rows computed after a hit whose entries lie in blocks 0.., in a slot that holds nothing yet.

    `replayed`: tokens recomputed before its end; None: one window.
    """
    replayed = replayed or window_tokens(family.layout)
    blocks = range(family.layout.blocks_for(len(tokens)))
    logits = []
    for at in range(max(0, hit - replayed), len(tokens), chunk):
        batch = batch_of([Piece(tokens[at : at + chunk], at, blocks, slot)])
        logits.append(family.forward(replaying(batch, tokens, hit, replayed=replayed), pool))
    return torch.cat(logits)
