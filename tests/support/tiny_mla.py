"""Tiny V2, V3 and V3.2 models for tests: written, opened, and laid over fresh pools. Knows no services."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.cache.pool import CachePool
from engine.families import Family, open_family
from engine.families.mla.tiny import TINY, TinySpec, write_tiny
from kernels import choose
from tests.support.tiny import BLOCK_TOKENS, Piece, batch_of, random_tokens, run_in_chunks

FAMILIES = ("v2", "v3", "v32")
# A latent much wider than a head, so that long chunks are cheaper un-absorbed.
WIDE = {"kv_lora_rank": 96, "qk_nope_head_dim": 16, "v_head_dim": 16}


def open_tiny(
    folder: Path, kernels: str = "cpu", dtype: torch.dtype = torch.float32, batch_invariant: bool = False
) -> Family:
    """The checkpoint in `folder`, with blocks of 16 tokens."""
    return open_family(folder, dtype, batch_invariant, choose(kernels), block_tokens=BLOCK_TOKENS)


def poisoned_pool(family: Family, blocks: int = 64, slots: int = 8) -> CachePool:
    """A pool whose unwritten bytes are NaN in every type, so that reading one shows."""
    pool = CachePool(family.layout, blocks, slots, getattr(torch, family.layout.group("latent").dtype))
    pool.blocks.fill_(0xFF)
    return pool


__all__ = [
    "BLOCK_TOKENS",
    "FAMILIES",
    "TINY",
    "WIDE",
    "Piece",
    "TinySpec",
    "batch_of",
    "open_tiny",
    "poisoned_pool",
    "random_tokens",
    "run_in_chunks",
    "write_tiny",
]
