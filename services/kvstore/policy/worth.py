"""Worth: how much a cached block earns for the room it takes, from how blocks of its kind were used before.

A block of age `a` that is kept for up to `h` more seconds earns one hit with the chance that its next use falls into
that time, and takes room until the use or the end of it. Its worth is the best ratio of the two over all `h`: the
Gittins index of keeping it (Gittins 1979; hit density with one horizon: Beckmann, Chen and Cidon, LHD, NSDI 2018).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.kvstore.policy.ages import BINS, WIDTHS

Floats = npt.NDArray[np.float64]

_PRIOR_REUSE = 0.02  # chance of a use within one bin while nothing is known: worth then falls with age alone, as in LRU
_PRIOR_SEEN = 2.0  # blocks that the prior counts as
_SHARED_SEEN = 30.0  # blocks that a wider group counts as, against what its part showed


def chances(uses: Floats, at_risk: Floats) -> Floats:
    """Chance of a use in each bin for blocks that reached it, `[KINDS, BINS]`.

    Kinds that were seen rarely lean on all others.

    Args:
        uses: how many blocks were used in that bin. at_risk: how many reached it unused. Both `[KINDS, BINS]`.
    """
    prior = _lean(uses.sum(0), at_risk.sum(0), np.float64(_PRIOR_REUSE), _PRIOR_SEEN)
    return _lean(uses, at_risk, prior, _SHARED_SEEN)


def _lean(uses: Floats, seen: Floats, prior: Floats | np.float64, weight: float) -> Floats:
    return np.minimum((uses + weight * prior) / (seen + weight), 1.0)


def worths(chance: Floats) -> Floats:
    """Hits per second of room that a block of each kind and age is worth, `[kinds, bins]` for chances of that shape."""
    shape = (BINS, len(chance))  # a row for each age to start from
    alive, earned, room, best = np.ones(shape), np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for bin_ in range(BINS):
        started = slice(0, bin_ + 1)
        hit = alive[started] * chance[:, bin_]
        earned[started] += hit
        room[started] += (alive[started] - hit / 2) * WIDTHS[bin_]
        alive[started] -= hit
        best[started] = np.maximum(best[started], earned[started] / room[started])
    return best.T.copy()
