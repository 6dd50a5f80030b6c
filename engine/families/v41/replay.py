"""SWA bounded replay: which rows are recomputed or left out, and which positions their windows may see. Runs nothing.

Both forms are approximate by design. Encoder side: after a prefix hit without window state, the last window before it
is recomputed. Decoder side: of a chunk, only the last window goes above the last entry source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engine.batch import RaggedBatch
from kernels.operands import Ragged, Windows


@dataclass(frozen=True, slots=True)
class Resume:
    """Prefix hits whose entries are cached but whose window rows are not; 0 where a sequence resumes nothing.

    A sequence with a hit starts at `replay_start(hit, window)` and keeps naming the hit until its context reaches it.
    """

    hits: np.ndarray  # int32 [sequences] tokens whose entries and index keys are in the cache
    before: np.ndarray  # int64 [sequences, tokens] ids before each context, nearest first; -1: none


def replay_start(hit: int, window: int) -> int:
    """First position that is recomputed after a hit of `hit` tokens."""
    return max(0, hit - window)


def resumed(rows: Ragged, resume: Resume, window: int) -> Ragged:
    """The rows with windows that end at the replay's start and without entries that the hit holds already.

    Raises ValueError for hits that do not fit the batch.
    """
    hits = np.asarray(resume.hits, np.int32)
    if hits.shape != rows.context.shape or resume.before.shape[0] != len(hits) or (hits < 0).any():
        raise ValueError(f"hits {hits.tolist()} do not name one prefix for each of {len(rows.context)} sequences")
    replaying = hits > rows.context
    floors = np.where(replaying, np.maximum(hits - window, 0), 0).astype(np.int32)
    if (rows.context < floors).any():
        raise ValueError(f"contexts {rows.context.tolist()} begin before the replay of hits {hits.tolist()}")
    return replace(rows, floors=floors, windows={rate: _new(done, rate, hits) for rate, done in rows.windows.items()})


def kept_rows(batch: RaggedBatch, window: int) -> np.ndarray:
    """Rows (int64, ascending) that go on above the last entry source: the last `window` of every sequence.

    A sequence of which an earlier row's logits are wanted keeps all of its rows.
    """
    starts = np.asarray(batch.starts, np.int64)
    first = np.maximum(starts[:-1], starts[1:] - window)
    owner = np.searchsorted(starts, batch.logit_rows, side="right") - 1
    whole = owner[np.asarray(batch.logit_rows) < first[owner]]
    first[whole] = starts[whole]
    return np.concatenate([np.arange(begin, end) for begin, end in zip(first, starts[1:], strict=True)])


def query_rows(rows: Ragged, kept: np.ndarray) -> Ragged:
    """Only the kept rows ask; keys stay those of all rows."""
    return replace(
        rows, tokens=rows.tokens[kept], positions=rows.positions[kept], sequences=rows.sequences[kept], windows={}
    )


def upper_rows(rows: Ragged, kept: np.ndarray) -> Ragged:
    """Only the kept rows exist: where a sequence lost rows, its windows end at the first that is left."""
    starts = np.searchsorted(kept, rows.starts).astype(np.int32)
    lost = np.diff(rows.starts) - np.diff(starts)
    context = (rows.context + lost).astype(np.int32)
    floors = np.where(lost > 0, context, rows.window_floors).astype(np.int32)
    return replace(query_rows(rows, kept), starts=starts, context=context, floors=floors)


def _new(done: Windows, rate: int, hits: np.ndarray) -> Windows:
    """Without windows that end within their sequence's hit."""
    new = (done.window + 1) * rate > hits[done.sequence]
    return Windows(np.ascontiguousarray(done.sequence[new]), np.ascontiguousarray(done.window[new]))
