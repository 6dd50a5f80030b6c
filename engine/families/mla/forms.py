"""Which sequences of a batch attend un-absorbed, by cost, and the batch of the others. Knows counts, runs nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engine.families.mla.config import MlaConfig
from kernels.operands import Ragged

_LONG = 16  # new rows; fewer stay in the absorbed operator, which takes all sequences of a batch at once


@dataclass(frozen=True, slots=True)
class Forms:
    """`expanded`: sequences that attend un-absorbed; `rest`: the others as a batch, `rows` its rows in the whole."""

    expanded: tuple[int, ...]
    rest: Ragged
    rows: np.ndarray


def is_cheaper_expanded(config: MlaConfig, context: int, new: int) -> bool:
    """Whether `new` rows after `context` cached ones need fewer multiplications per head in the un-absorbed form.

    Un-absorbed, every cached row is expanded once and each score costs the head's own width; absorbed, each query is
    taken to the latent and back, and each score costs the latent's width, but for selected rows only.
    """
    if new < _LONG:
        return False
    rank, rope, seen = config.latent_rank, config.rope, context + new
    projection = rank * (config.nope + config.value)
    read = min(context + new / 2, config.index.topk if config.index else np.inf)
    absorbed = new * (projection + read * (2 * rank + rope))
    expanded = seen * projection + new * seen * (config.nope + rope + config.value)
    return bool(expanded < absorbed)


def forms(config: MlaConfig, rows: Ragged, expandable: bool) -> Forms:
    """Choose for every sequence; all absorbed unless `expandable`."""
    new = np.diff(rows.starts)
    if not expandable or new.max() < _LONG:
        return Forms((), rows, np.arange(rows.rows))
    pairs = zip(rows.context, new, strict=True)
    cheaper = np.array([is_cheaper_expanded(config, int(c), int(n)) for c, n in pairs])
    if not cheaper.any():
        return Forms((), rows, np.arange(rows.rows))
    kept = np.flatnonzero(~cheaper)
    at = np.flatnonzero(~cheaper[rows.sequences])
    rest = replace(
        rows,
        tokens=rows.tokens[at],
        positions=rows.positions[at],
        sequences=np.repeat(np.arange(len(kept), dtype=np.int32), new[kept]),
        starts=np.concatenate(([0], np.cumsum(new[kept]))).astype(np.int32),
        context=rows.context[kept],
        slots=rows.slots[kept],
        tables=rows.tables[kept],
    )
    return Forms(tuple(map(int, np.flatnonzero(cheaper))), rest, at)


def alone(rows: Ragged, at: np.ndarray) -> Ragged:
    """Rows `at` of a batch, each as a sequence of its own whose earlier rows are cached."""
    sequences, count = rows.sequences[at], len(at)
    return replace(
        rows,
        tokens=rows.tokens[at],
        positions=rows.positions[at],
        sequences=np.arange(count, dtype=np.int32),
        starts=np.arange(count + 1, dtype=np.int32),
        context=rows.positions[at],
        slots=rows.slots[sequences],
        tables=rows.tables[sequences],
    )
