"""Running the engine's own model for parity: one sequence, in pieces, over a pool of its own. Knows no reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from engine.families import Family, open_family
from kernels import choose

BLOCK_TOKENS, BLOCKS = 16, 16


def tokens_of(count: int, seed: int) -> list[int]:
    """Seeded tokens without the special ones."""
    return np.random.default_rng(seed).integers(3, 512, count).tolist()


def open_tiny(folder: Path, kernels: str) -> tuple[Family, CachePool]:
    """The engine's model and an empty pool."""
    family = open_family(folder, torch.float32, False, choose(kernels), block_tokens=BLOCK_TOKENS)
    return family, fresh(family)


def fresh(family: Family) -> CachePool:
    """An empty pool for one sequence or two."""
    return CachePool(family.layout, BLOCKS, 4, torch.float32)


def piece(tokens: Sequence[int], context: int, slot: int = 1) -> RaggedBatch:
    """`tokens` after `context` cached ones, asking for every row's logits; blocks in an order that no code expects."""
    return RaggedBatch(
        tokens=np.array(tokens, np.int64),
        positions=np.arange(context, context + len(tokens), dtype=np.int64),
        starts=np.array([0, len(tokens)], np.int32),
        context=np.array([context], np.int32),
        block_tables=(tuple(range(BLOCKS - 1, -1, -1)),),
        slots=np.array([slot], np.int64),
        logit_rows=np.arange(len(tokens), dtype=np.int64),
    )


def run(family: Family, pool: CachePool, tokens: Sequence[int], chunk: int, start: int = 0) -> torch.Tensor:
    """Logits of tokens[start:], computed `chunk` at a time over what the pool holds."""
    return torch.cat(
        [family.forward(piece(tokens[at : at + chunk], at), pool) for at in range(start, len(tokens), chunk)]
    )


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference; NaN if any value is."""
    return float((found - expected).abs().max())
