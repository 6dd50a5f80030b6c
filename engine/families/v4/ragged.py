"""Engine batches as the operators read them: per-row positions, padded tables, finished compressor windows."""

from __future__ import annotations

import numpy as np

from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from engine.families.replay import require_hits, resumed
from kernels.operands import Ragged, Windows


def ragged(batch: RaggedBatch, rates: tuple[int, ...]) -> Ragged:
    """Arrays of one batch; `rates` are the compress rates whose finished windows are wanted."""
    starts = np.ascontiguousarray(batch.starts, np.int32)
    context = np.ascontiguousarray(batch.context, np.int32)
    new = np.diff(starts)
    tables = np.zeros((batch.sequences, max(map(len, batch.block_tables))), np.int32)
    for row, table in zip(tables, batch.block_tables, strict=True):
        row[: len(table)] = table
    return Ragged(
        tokens=np.ascontiguousarray(batch.tokens, np.int64),
        positions=np.ascontiguousarray(batch.positions, np.int32),
        sequences=np.repeat(np.arange(batch.sequences, dtype=np.int32), new),
        starts=starts,
        context=context,
        slots=np.ascontiguousarray(batch.slots, np.int32),
        tables=tables,
        windows={rate: _finished(context, new, rate) for rate in rates},
    )


def rows_of(batch: RaggedBatch, rates: tuple[int, ...]) -> Ragged:
    """As `ragged`, and where the batch replays, with windows and entries as they are after its hits."""
    rows = ragged(batch, rates)
    if batch.replay is None:
        return rows
    require_hits(batch.replay, batch)
    return resumed(rows, batch.replay)


def check(batch: RaggedBatch, cache: CachePool, vocab_size: int, max_context_tokens: int) -> None:
    """Raise ValueError for a batch that would read or write outside the cache: compiled operators do not look."""
    starts, context = batch.starts, batch.context
    new = np.diff(starts)
    if not len(new) or new.min() < 1 or starts[0] != 0 or starts[-1] != batch.rows:
        raise ValueError(f"starts {starts.tolist()} do not split {batch.rows} rows into sequences")
    ends = context + new
    _within("tokens", batch.tokens, vocab_size)
    _within("slots", batch.slots, cache.slots.shape[0])
    _within("positions", batch.positions, max_context_tokens)
    _within("logit_rows", batch.logit_rows, batch.rows)
    if not np.array_equal(batch.positions - np.repeat(context - starts[:-1], new), np.arange(batch.rows)):
        raise ValueError("positions do not go on from each sequence's context")
    _within("block_tables", np.concatenate(batch.block_tables), cache.blocks.shape[0])
    have, need = np.array([len(table) for table in batch.block_tables]), -(-ends // cache.layout.block_tokens)
    if (have < need).any():
        s = int(np.argmax(have < need))
        raise ValueError(f"sequence {s} has {have[s]} blocks, needs {need[s]}")


def _within(name: str, values: np.ndarray, limit: int) -> None:
    if len(values) and (values.min() < 0 or values.max() >= limit):
        raise ValueError(f"{name} must lie in 0 .. {limit - 1}, got {values.min()} .. {values.max()}")


def _finished(context: np.ndarray, new: np.ndarray, rate: int) -> Windows:
    """Windows whose last token arrives in this batch, sequence by sequence."""
    first = context // rate
    counts = (context + new) // rate - first
    sequence = np.repeat(np.arange(len(context), dtype=np.int32), counts)
    within = np.arange(counts.sum(), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    return Windows(sequence, (first[sequence] + within).astype(np.int32))
