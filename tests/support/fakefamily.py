"""A fake model family: logits are a hash of what it reads back from the cache, so wrong bytes give wrong tokens.

Its layout has what a real one has: a record per token, a record per four tokens, a ring, and a recurrent state row.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from engine.config import EngineConfig
from engine.engine import Engine
from engine.layout import CacheGroup, GroupKind, Layout
from engine.model import ModelInfo

VOCAB = 64
EOS = 1
NAN_TOKEN = VOCAB - 2  # a sequence that ends with it gets NaN logits
POISON_TOKEN = VOCAB - 1  # a batch that computes it raises
BLOCK_TOKENS = 8
WINDOW = 5

LAYOUT = Layout(
    BLOCK_TOKENS,
    0,
    (
        CacheGroup("entry", GroupKind.GLOBAL, 1, BLOCK_TOKENS, 1, 8, "float32", "fake-1"),
        CacheGroup("pooled", GroupKind.GLOBAL, 1, BLOCK_TOKENS // 4, 4, 8, "float32", "fake-1"),
        CacheGroup("ring", GroupKind.WINDOW, 1, WINDOW, 1, 8, "float32", "fake-1"),
        CacheGroup("state", GroupKind.WINDOW, 1, 1, 1, 8, "float32", "fake-1"),
    ),
)
MODEL = ModelInfo("fake", "revision-1", "fake", VOCAB, 4096, (EOS,), LAYOUT)


def _mix(*values: int) -> int:
    return xxh3_64_intdigest(np.array(values, dtype=np.uint64).tobytes())


class FakeFamily:
    """Everything a logit depends on went through the pool's bytes. `spy` sees every batch before it runs."""

    def __init__(self, spy: Callable[[RaggedBatch], None] = lambda batch: None) -> None:
        self.layout, self._spy = LAYOUT, spy

    def forward(self, batch: RaggedBatch, cache: CachePool) -> torch.Tensor:
        """Logits `[len(batch.logit_rows), VOCAB]`."""
        self._spy(batch)
        hashes = np.zeros(batch.rows, dtype=np.uint64)
        broken = np.zeros(batch.rows, dtype=bool)
        for index in range(batch.sequences):
            for row in range(int(batch.starts[index]), int(batch.starts[index + 1])):
                token, position = int(batch.tokens[row]), int(batch.positions[row])
                if token == POISON_TOKEN:
                    raise RuntimeError("poisoned token")
                hashes[row] = self._token(token, position, batch.block_tables[index], int(batch.slots[index]), cache)
                broken[row] = token == NAN_TOKEN
        logits = _logits(hashes[batch.logit_rows])
        logits[broken[batch.logit_rows]] = np.nan
        return torch.from_numpy(logits)

    def _token(self, token: int, position: int, table: tuple[int, ...], slot: int, cache: CachePool) -> int:
        block, offset = table[position // BLOCK_TOKENS], position % BLOCK_TOKENS
        entries = cache.block_extent("entry", block).view(np.uint64)
        entries[offset] = _mix(token, position)
        if offset % 4 == 3:
            cache.block_extent("pooled", block).view(np.uint64)[offset // 4] = _mix(*entries[offset - 3 : offset + 1])
        ring = cache.slot_extent("ring", slot).view(np.uint64)
        ring[position % WINDOW] = _mix(token, position, 7)
        state = cache.slot_extent("state", slot).view(np.uint64)
        state[0] = _mix(int(state[0]) if position else 0, token)
        seen = [
            np.concatenate([cache.block_extent(group, one).view(np.uint64) for one in table])[:count]
            for group, count in (("entry", position + 1), ("pooled", (position + 1) // 4))
        ]
        window = [int(ring[place % WINDOW]) for place in range(max(0, position - WINDOW + 1), position + 1)]
        return _mix(*np.concatenate(seen).tolist(), *window, int(state[0]))


def _logits(hashes: np.ndarray) -> np.ndarray:
    """Pseudo-random logits in [0, 8) from one hash per row, `[rows, VOCAB]`."""
    lanes = hashes[:, None] + np.arange(VOCAB, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    lanes ^= lanes >> np.uint64(31)
    lanes *= np.uint64(0xBF58476D1CE4E5B9)
    lanes ^= lanes >> np.uint64(29)
    logits = (lanes >> np.uint64(40)).astype(np.float32) / np.float32(2**24) * np.float32(8)
    logits[:, NAN_TOKEN:] = -1e4  # never chosen: only a prompt brings them in
    return logits


def fake_engine(
    num_blocks: int = 64,
    num_slots: int = 24,
    spy: Callable[[RaggedBatch], None] = lambda batch: None,
    decode: Callable[[list[int]], str] | None = None,
    **config: object,
) -> Engine:
    """An engine over a FakeFamily; `config` overrides fields of EngineConfig."""
    settings = EngineConfig(
        Path("fake"), **{"max_batch_tokens": 16, "max_sequences": 8, "anchor_every_blocks": 2, **config}
    )
    pool = CachePool(LAYOUT, num_blocks, num_slots, torch.float32)
    return Engine(FakeFamily(spy), pool, MODEL, settings, decode, clock=lambda: 0.0)


def letters(tokens: list[int]) -> str:
    """A decoder for tests: one character per token."""
    return "".join(chr(97 + token % 26) for token in tokens)
