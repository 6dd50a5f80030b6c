"""Appraiser: what a block of a kind and age is worth now, learned from uses. Knows kinds and ages; holds no blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Generic, TypeVar

import numpy as np

from services.kvstore.policy.ages import BINS
from services.kvstore.policy.monitor import ReuseMonitor
from services.kvstore.policy.traits import KINDS
from services.kvstore.policy.worth import Floats, chances, worths

K = TypeVar("K", bound=Hashable)
EVENTS = 131_072  # uses remembered; about 100 bytes each
RECENT = 32_768  # uses that make up the present
HORIZON_S = 3600.0  # uses are remembered this long at least, of fewer keys if need be
_FIRST, _EVERY = 256, 2_048  # uses between appraisals: often while little is known


class Appraiser(Generic[K]):
    """Tells `appraised` a table `[KINDS, BINS]` of worths at once and whenever enough was learned to make it anew."""

    def __init__(self, sample: Callable[[K], int], appraised: Callable[[Floats], None]) -> None:
        self._monitor: ReuseMonitor[K] = ReuseMonitor(EVENTS, RECENT, HORIZON_S, sample)
        self._appraised = appraised
        self._due = _FIRST
        appraised(_untaught())

    def used(self, key: K, kind: int, now: float) -> None:
        """A block was used or offered, and is of `kind` from now on."""
        seen = self._monitor.used(key, kind, now)
        if seen >= self._due:
            self._due = seen + min(_EVERY, max(_FIRST, seen // 4))
            self._appraise(now)

    def _appraise(self, now: float) -> None:
        self._appraised(worths(chances(*self._monitor.uses(now))))


@cache
def _untaught() -> Floats:
    nothing = np.zeros((KINDS, BINS))
    return worths(chances(nothing, nothing))
