"""SWA bounded replay: which rows are recomputed or left out, and which positions their windows may see. Runs nothing.

Both forms are approximate by design. Encoder side: after a prefix hit without window state, the last window before it
is recomputed. Decoder side: of a prompt, only the last window goes above the last entry source.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.batch import RaggedBatch, Replay
from kernels.operands import Ragged, Windows


def require_fit(replay: Replay, batch: RaggedBatch, before: int) -> None:
    """Raise ValueError unless `replay` names, for every sequence, a hit, `before` earlier ids and an upper start."""
    hits, upper = np.asarray(replay.hits), np.asarray(replay.upper)
    if hits.shape != batch.context.shape or upper.shape != hits.shape or (hits < 0).any() or (upper < 0).any():
        sizes = f"hits {hits.tolist()} and upper starts {upper.tolist()}"
        raise ValueError(f"{sizes} do not name one prefix for each of {batch.sequences} sequences")
    if replay.before.shape[0] != len(hits) or replay.before.shape[1] < before:
        raise ValueError(f"{replay.before.shape} ids precede {len(hits)} sequences, {before} are needed for each")
    lost = np.asarray(batch.positions)[batch.logit_rows] < upper[owners(batch)]
    if lost.any():
        rows = np.asarray(batch.logit_rows)[lost]
        raise ValueError(f"logits of rows {rows.tolist()} are wanted, which stay below the upper layers")


def owners(batch: RaggedBatch) -> np.ndarray:
    """The sequence of each row whose logits are wanted."""
    return np.searchsorted(batch.starts, batch.logit_rows, side="right") - 1


def resumed(rows: Ragged, replay: Replay, window: int) -> Ragged:
    """The rows with windows that end at the replay's start and without entries that the hit holds already.

    Raises ValueError for a hit whose replay begins after a sequence's context.
    """
    hits = np.asarray(replay.hits, np.int32)
    replaying = hits > rows.context
    floors = np.where(replaying, np.maximum(hits - window, 0), 0).astype(np.int32)
    if (rows.context < floors).any():
        raise ValueError(f"contexts {rows.context.tolist()} begin before the replay of hits {hits.tolist()}")
    return replace(rows, floors=floors, windows={rate: _new(done, rate, hits) for rate, done in rows.windows.items()})


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


def _new(done: Windows, rate: int, hits: np.ndarray) -> Windows:
    """Without windows that end within their sequence's hit."""
    new = (done.window + 1) * rate > hits[done.sequence]
    return Windows(np.ascontiguousarray(done.sequence[new]), np.ascontiguousarray(done.window[new]))
