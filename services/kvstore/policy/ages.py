"""Ages: idle time cut into bins that grow geometrically, from seconds to the longest retention. Knows seconds only."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

_FIRST_S, _GROWTH, _LONGEST_S = 4.0, 1.5, 7 * 24 * 3600.0
_ROUNDING = 1e-9  # an age at an edge is in the upper bin


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


def age_bins(ages_s: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
    """The bin of each age; within rounding of an edge it may be the neighbour of what `age_bin` says."""
    steps = np.log(np.maximum(ages_s, _FIRST_S * 0.9) / _FIRST_S) / np.log(_GROWTH)
    bins: npt.NDArray[np.intp] = np.minimum(np.floor(steps + 1.0 + _ROUNDING), BINS - 1).astype(np.intp)
    return bins
