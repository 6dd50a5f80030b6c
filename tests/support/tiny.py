"""Tiny V4 models for tests: opened on a pool of their own, run in any pieces. Knows no services."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from engine.families import Family, open_family
from engine.families.v4.tiny import TinySpec, write_tiny
from kernels import choose

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one sequence that one forward computes."""

    tokens: Sequence[int]
    context: int
    blocks: Sequence[int]
    slot: int


def tiny_family(folder: Path, kernels: str = "cpu", dtype: torch.dtype = torch.float32) -> Family:
    """The tiny checkpoint in `folder` (see TinySpec), with blocks of 16 tokens."""
    return open_family(folder, dtype, False, choose(kernels), block_tokens=BLOCK_TOKENS)


def fresh_pool(family: Family, blocks: int = 64, slots: int = 8, poison: bool = True) -> CachePool:
    """A pool whose unwritten bytes are NaN in every type, so that reading one shows."""
    pool = CachePool(family.layout, blocks, slots, getattr(torch, family.layout.group("window").dtype))
    if poison:
        pool.blocks.fill_(0xFF)
        pool.slots.fill_(0xFF)
    return pool


def batch_of(pieces: Sequence[Piece]) -> RaggedBatch:
    """One batch of the pieces, asking for every row's logits."""
    starts = np.concatenate(([0], np.cumsum([len(piece.tokens) for piece in pieces]))).astype(np.int32)
    return RaggedBatch(
        tokens=np.concatenate([np.asarray(piece.tokens, np.int64) for piece in pieces]),
        positions=np.concatenate(
            [np.arange(piece.context, piece.context + len(piece.tokens), dtype=np.int64) for piece in pieces]
        ),
        starts=starts,
        context=np.array([piece.context for piece in pieces], np.int32),
        block_tables=tuple(tuple(piece.blocks) for piece in pieces),
        slots=np.array([piece.slot for piece in pieces], np.int64),
        logit_rows=np.arange(starts[-1], dtype=np.int64),
    )


def run_in_chunks(
    family: Family,
    pool: CachePool,
    tokens: Sequence[int],
    chunk: int,
    start: int = 0,
    first_block: int = 0,
    slot: int = 0,
) -> torch.Tensor:
    """Logits [len(tokens) - start, vocabulary] of one sequence computed from `start` on, `chunk` tokens at a time."""
    blocks = range(first_block, first_block + family.layout.blocks_for(len(tokens)))
    logits = []
    for at in range(start, len(tokens), chunk):
        logits.append(family.forward(batch_of([Piece(tokens[at : at + chunk], at, blocks, slot)]), pool))
    return torch.cat(logits)


def random_tokens(count: int, seed: int, vocabulary: int = 512) -> list[int]:
    """Seeded token ids without the special ones."""
    return np.random.default_rng(seed).integers(3, vocabulary, count).tolist()


__all__ = [
    "BLOCK_TOKENS",
    "Piece",
    "TinySpec",
    "batch_of",
    "fresh_pool",
    "random_tokens",
    "run_in_chunks",
    "tiny_family",
    "write_tiny",
]
