"""One sequence over pools of its own, for measurements that want a family's logits. Knows no engine and no requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from engine.families import Family
from engine.layout import Layout

CHUNK_TOKENS = 512


def pool_of(layout: Layout, tokens: int, dtype: torch.dtype) -> CachePool:
    """A pool for one sequence of `tokens` tokens."""
    return CachePool(layout, layout.blocks_for(tokens), 1, dtype)


def piece(layout: Layout, tokens: Sequence[int], context: int, rows: Sequence[int] | None = None) -> RaggedBatch:
    """`tokens` after `context` cached ones; logits of `rows`, or of all."""
    count = len(tokens)
    return RaggedBatch(
        tokens=np.asarray(tokens, np.int64),
        positions=np.arange(context, context + count, dtype=np.int64),
        starts=np.array([0, count], np.int32),
        context=np.array([context], np.int32),
        block_tables=(tuple(range(layout.blocks_for(context + count))),),
        slots=np.zeros(1, np.int64),
        logit_rows=np.asarray(range(count) if rows is None else rows, np.int64),
    )


def logits_from(family: Family, tokens: Sequence[int], first: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits [len(tokens) - first, vocabulary] at and after position `first`, in chunks."""
    pool, found = pool_of(family.layout, len(tokens), dtype), []
    for at in range(0, len(tokens), CHUNK_TOKENS):
        part = tokens[at : at + CHUNK_TOKENS]
        wanted = range(min(max(first - at, 0), len(part)), len(part))
        logits = family.forward(piece(family.layout, part, at, wanted or [0]), pool)
        found.append(logits[: len(wanted)])
    return torch.cat(found)
