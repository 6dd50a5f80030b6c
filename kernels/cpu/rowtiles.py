"""Tiles of neighbouring rows of one sequence, which share what they read. Knows batches, not operators."""

from __future__ import annotations

import numpy as np

from kernels.cpu.compile import Array
from kernels.operands import Ragged

_LANES = 32  # heads times rows of one tile


def row_tiles(ragged: Ragged, heads: int) -> Array:
    """First rows (int32) of tiles of one sequence whose heads fill about two panels, closed by the number of rows."""
    most = max(1, _LANES // heads)
    within = np.arange(ragged.rows, dtype=np.int32) - ragged.starts[ragged.sequences]
    return np.append(np.flatnonzero(within % most == 0), ragged.rows).astype(np.int32)
