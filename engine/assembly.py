"""Assembly: turns a plan's chunks into one ragged batch and says which rows of its logits are whose."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from engine.batch import RaggedBatch, Replay
from engine.images import ImageRows, rows_within
from engine.layout import Layout
from engine.scheduler import Chunk

_BEFORE = 8  # tokens told of what precedes a replay: more than any n-gram reaches back


@dataclass(frozen=True, slots=True)
class Rows:
    """Logit rows of one chunk: first those of prompt tokens whose successors' log probabilities are wanted."""

    chunk: Chunk
    prompt_positions: range
    samples: bool  # whether one more row follows, from which the next token is drawn


def rows_of(chunk: Chunk) -> Rows:
    """Which logits a chunk must yield."""
    sequence = chunk.sequence
    first = last = chunk.end
    if sequence.sampling.prompt_logprobs is not None:
        first = max(chunk.start, len(sequence.prompt_logprobs))  # a recomputed chunk yields none twice
        last = max(first, min(chunk.end, sequence.prompt_tokens - 1))
    return Rows(chunk, range(first, last), chunk.end == sequence.total_tokens and not sequence.entries_only)


def assemble(chunks: Items[Chunk], layout: Layout) -> tuple[RaggedBatch, list[Rows]]:
    """The batch of `chunks`, sequence after sequence, and the meaning of its logit rows in their order."""
    counts = [chunk.count for chunk in chunks]
    starts = np.concatenate(([0], np.cumsum(counts)))
    rows = [rows_of(chunk) for chunk in chunks]
    wanted: list[int] = []
    for row, offset in zip(rows, starts, strict=False):
        shift = int(offset) - row.chunk.start
        wanted.extend(position + shift for position in row.prompt_positions)
        if row.samples:
            wanted.append(row.chunk.end - 1 + shift)
    if not wanted and not layout.replay.tokens:
        wanted = [int(starts[-1]) - 1]  # unread: only a family that replays need handle none
    tokens = [token for chunk in chunks for token in chunk.sequence.tokens[chunk.start : chunk.end]]
    batch = RaggedBatch(
        tokens=np.array(tokens, dtype=np.int64),
        positions=np.concatenate([np.arange(chunk.start, chunk.end, dtype=np.int64) for chunk in chunks]),
        starts=starts.astype(np.int32),
        context=np.array([chunk.start for chunk in chunks], dtype=np.int32),
        block_tables=tuple(_table(chunk, layout.block_tokens) for chunk in chunks),
        slots=np.array([chunk.sequence.slot for chunk in chunks], dtype=np.int64),
        logit_rows=np.array(wanted, dtype=np.int64),
        replay=_replay(chunks, layout.replay.tokens) if layout.replay.tokens else None,
        images=_images(chunks, starts),
    )
    return batch, rows


def _table(chunk: Chunk, block_tokens: int) -> np.ndarray:
    return np.array(chunk.sequence.blocks[: -(-chunk.end // block_tokens)], np.int32)


def _images(chunks: Items[Chunk], starts: np.ndarray) -> ImageRows | None:
    """What of the sequences' images these chunks compute."""
    found = [
        (int(offset) + begin - chunk.start, rows)
        for chunk, offset in zip(chunks, starts, strict=False)
        for begin, rows in rows_within(chunk.sequence.images, chunk.start, chunk.end)
    ]
    if not found:
        return None
    at = [np.arange(first, first + len(rows), dtype=np.int64) for first, rows in found]
    return ImageRows(np.concatenate(at), np.concatenate([rows for _, rows in found]))


def _replay(chunks: Items[Chunk], tokens: int) -> Replay:
    sequences = [chunk.sequence for chunk in chunks]
    before = np.full((len(chunks), _BEFORE), -1, dtype=np.int64)
    for row, chunk in zip(before, chunks, strict=True):
        known = chunk.sequence.tokens[max(0, chunk.start - _BEFORE) : chunk.start]
        row[: len(known)] = known[::-1]
    return Replay(
        hits=np.array([sequence.replay_hit for sequence in sequences], dtype=np.int32),
        before=before,
        upper=np.array([sequence.upper_from for sequence in sequences], dtype=np.int32),
        tokens=tokens,
    )
