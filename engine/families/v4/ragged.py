"""Engine batches as the operators read them: per-row positions, padded tables, finished compressor windows."""

from __future__ import annotations

import numpy as np

from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
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


def check(batch: RaggedBatch, cache: CachePool, vocab_size: int, max_context_tokens: int) -> None:
    """Raise ValueError for a batch that would read or write outside the cache: compiled operators do not look."""
    new = np.diff(batch.starts)
    if not len(new) or new.min() < 1 or batch.starts[0] != 0 or batch.starts[-1] != batch.rows:
        raise ValueError(f"starts {batch.starts.tolist()} do not split {batch.rows} rows into sequences")
    _within("tokens", batch.tokens, vocab_size)
    _within("slots", batch.slots, cache.slots.shape[0])
    _within("positions", batch.context + new - 1, max_context_tokens)
    _within("logit_rows", batch.logit_rows, batch.rows)
    expected = np.concatenate([np.arange(c, c + n) for c, n in zip(batch.context, new, strict=True)])
    if not np.array_equal(batch.positions, expected):
        raise ValueError("positions do not go on from each sequence's context")
    for s, table in enumerate(batch.block_tables):
        need = cache.layout.blocks_for(int(batch.context[s] + new[s]))
        if len(table) < need:
            raise ValueError(f"sequence {s} has {len(table)} blocks, needs {need}")
        _within(f"block_tables[{s}]", np.asarray(table), cache.blocks.shape[0])


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
