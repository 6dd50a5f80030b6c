"""Ragged batch: the tokens one forward computes, by sequence, and where their cache is. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.images import ImageRows


@dataclass(frozen=True, slots=True)
class Replay:
    """Bounded replay of a batch's sequences; only models whose layout says so are given one.

    A sequence with a hit starts at most `tokens` before its end, and keeps naming it until its context reaches it.
    """

    hits: np.ndarray  # int32 [sequences] tokens whose global entries are cached though their window rows are not
    before: np.ndarray  # int64 [sequences, tokens] ids before each context, nearest first; -1: none
    upper: np.ndarray  # int32 [sequences] first position that goes above the last entry source; 0: every one does
    tokens: int  # recomputed before the end of each hit: one window, or as many as there are layers


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Prefill chunks and decode steps in any mixture. Each sequence goes on after its `context` cached tokens."""

    tokens: np.ndarray  # int64 [rows]
    positions: np.ndarray  # int64 [rows]
    starts: np.ndarray  # int32 [sequences + 1] first row of each sequence
    context: np.ndarray  # int32 [sequences] tokens cached before this batch
    block_tables: tuple[tuple[int, ...] | np.ndarray, ...]  # per sequence: blocks of positions 0 .. context + new - 1
    slots: np.ndarray  # int64 [sequences] window slot of each sequence
    logit_rows: np.ndarray  # int64 [wanted] rows whose logits are returned, in this order
    replay: Replay | None = None
    images: ImageRows | None = None  # only models that take images are given any

    @property
    def rows(self) -> int:
        """Tokens computed by the forward."""
        return len(self.tokens)

    @property
    def sequences(self) -> int:
        """Sequences that take part."""
        return len(self.context)
