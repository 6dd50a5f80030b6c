"""Tiles of neighbouring rows of one sequence, which share what they read. Knows batches, not operators."""

from __future__ import annotations

import numpy as np

from kernels.cpu.compile import Array
from kernels.operands import Ragged

_LANES = 32  # heads times rows of one tile


def row_tiles(ragged: Ragged, heads: int) -> Array:
    """First rows (int32) of tiles of one sequence whose heads fill about two panels, closed by the number of rows."""
    most = max(1, _LANES // heads)
    # Not from `starts`: that of a part of the rows counts the rows of the whole.
    within = np.arange(ragged.rows) - np.searchsorted(ragged.sequences, ragged.sequences)
    return np.append(np.flatnonzero(within % most == 0), ragged.rows).astype(np.int32)
