"""V4.1's own half of bounded replay: of a prompt only the last window goes above the last entry source. Runs nothing.

That is the decoder side, approximate by design. The other half, a prefix hit without window state, is every family's:
engine.families.replay.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.batch import RaggedBatch, Replay
from engine.families.replay import require_hits
from kernels.operands import Ragged


def require_fit(replay: Replay, batch: RaggedBatch, before: int) -> None:
    """Raise ValueError unless `replay` names, for every sequence, a hit, `before` earlier ids and an upper start."""
    require_hits(replay, batch)
    upper = np.asarray(replay.upper)
    if upper.shape != batch.context.shape or (upper < 0).any():
        raise ValueError(f"upper starts {upper.tolist()} do not name one for each of {batch.sequences} sequences")
    if replay.before.shape[0] != batch.sequences or replay.before.shape[1] < before:
        raise ValueError(f"{replay.before.shape} ids precede {batch.sequences} sequences, {before} are needed for each")
    lost = np.asarray(batch.positions)[batch.logit_rows] < upper[owners(batch)]
    if lost.any():
        rows = np.asarray(batch.logit_rows)[lost]
        raise ValueError(f"logits of rows {rows.tolist()} are wanted, which stay below the upper layers")


def owners(batch: RaggedBatch) -> np.ndarray:
    """The sequence of each row whose logits are wanted."""
    return np.searchsorted(batch.starts, batch.logit_rows, side="right") - 1


def kept_rows(rows: Ragged, upper: np.ndarray) -> np.ndarray:
    """Rows (int64, ascending) that go on above the last entry source: those from their sequence's `upper` start on."""
    return np.flatnonzero(rows.positions >= np.asarray(upper)[rows.sequences])


def query_rows(rows: Ragged, kept: np.ndarray) -> Ragged:
    """Only the kept rows ask; keys stay those of all rows."""
    return replace(
        rows, tokens=rows.tokens[kept], positions=rows.positions[kept], sequences=rows.sequences[kept], windows={}
    )


def upper_rows(rows: Ragged, kept: np.ndarray, upper: np.ndarray) -> Ragged:
    """Only the kept rows exist, in this batch as in those before: no window reaches below its sequence's start."""
    starts = np.searchsorted(kept, rows.starts).astype(np.int32)
    lost = np.diff(rows.starts) - np.diff(starts)
    floors = np.maximum(rows.window_floors, upper).astype(np.int32)
    return replace(query_rows(rows, kept), starts=starts, context=(rows.context + lost).astype(np.int32), floors=floors)
