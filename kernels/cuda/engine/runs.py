"""Runs of sequences that have equally many rows, which kernels over pages take at once. Knows counts, runs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np

from kernels.operands import Ragged


def alike(ragged: Ragged) -> Iterator[tuple[range, range]]:
    """Runs of sequences that have equally many rows: their numbers, and the rows of all of them."""
    new, first = np.diff(ragged.starts).tolist(), 0
    for _, run in groupby(new):
        last = first + len(list(run))
        yield range(first, last), range(int(ragged.starts[first]), int(ragged.starts[last]))
        first = last
