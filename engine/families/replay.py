"""Windows after a prefix hit without window state: which positions they may see, and which entries stand. Runs nothing.

The last tokens before the end of the hit are computed again. Their windows end at the first of them, for nothing is
known of the rows before, and entries that the hit holds are read and never written.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.batch import RaggedBatch, Replay
from kernels.operands import Ragged, Windows


def require_hits(replay: Replay, batch: RaggedBatch) -> None:
    """Raise ValueError unless `replay` names a hit for every sequence, none of which begins before its replay."""
    hits = np.asarray(replay.hits)
    if hits.shape != batch.context.shape or (hits < 0).any():
        raise ValueError(f"hits {hits.tolist()} do not name one prefix for each of {batch.sequences} sequences")
    if replay.tokens < 1:
        raise ValueError(f"{replay.tokens} tokens cannot be replayed")
    if (batch.context < floors(replay, batch.context)).any():
        raise ValueError(f"contexts {batch.context.tolist()} begin before the replay of hits {hits.tolist()}")


def floors(replay: Replay, context: np.ndarray) -> np.ndarray:
    """First position that each sequence's windows may see, int32 [sequences]; 0 where nothing is replayed any more."""
    hits = np.asarray(replay.hits, np.int32)
    return np.where(hits > context, np.maximum(hits - replay.tokens, 0), 0).astype(np.int32)


def is_over(replay: Replay | None, batch: RaggedBatch) -> bool:
    """Whether no window of the batch reaches back to what a replay left out: then it is a batch like any other."""
    if replay is None:
        return True
    upper = np.asarray(replay.upper)[np.repeat(np.arange(batch.sequences), np.diff(batch.starts))]
    reached = (upper == 0) | (batch.positions - replay.tokens + 1 >= upper)
    return bool((replay.hits <= batch.context).all() and reached.all())


def resumed(rows: Ragged, replay: Replay) -> Ragged:
    """The rows with windows that end at the replay's start and without entries that the hit holds already."""
    hits = np.asarray(replay.hits, np.int32)
    windows = {rate: _new(done, rate, hits) for rate, done in rows.windows.items()}
    return replace(rows, floors=floors(replay, rows.context), windows=windows)


def _new(done: Windows, rate: int, hits: np.ndarray) -> Windows:
    """Without windows that end within their sequence's hit."""
    new = (done.window + 1) * rate > hits[done.sequence]
    return Windows(np.ascontiguousarray(done.sequence[new]), np.ascontiguousarray(done.window[new]))
