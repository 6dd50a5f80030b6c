"""Ages: idle time cut into bins that grow geometrically, from seconds to the longest retention. Knows seconds only."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

_FIRST_S, _GROWTH, _LONGEST_S = 4.0, 1.5, 7 * 24 * 3600.0


def _edges() -> tuple[float, ...]:
    edges = [0.0, _FIRST_S]
    while edges[-1] < _LONGEST_S:
        edges.append(edges[-1] * _GROWTH)
    return tuple(edges)


EDGES = _edges()  # lower bound of each bin, seconds; the last bin has no upper bound
BINS = len(EDGES)
LOWER = np.array(EDGES)
WIDTHS = np.append(np.diff(LOWER), LOWER[-1])  # seconds; the last bin counts as if it doubled the age


def age_bin(age_s: float) -> int:
    """The bin of an age; a clock that went back counts as no age."""
    return max(bisect_right(EDGES, age_s) - 1, 0)
