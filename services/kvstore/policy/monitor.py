"""Reuse monitor: when blocks of each kind were used again, whether held or not. A sample of keys, bounded in memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from services.kvstore.policy.ages import BINS, age_bins
from services.kvstore.policy.traits import KINDS
from services.kvstore.policy.worth import Floats

K = TypeVar("K", bound=Hashable)
_UNUSED = -1.0


class ReuseMonitor(Generic[K]):
    """A ring of the last `events` uses of sampled keys; samples fewer keys where the ring is shorter than `horizon_s`.

    Held and evicted blocks count alike, so what the cache decided does not colour what it learns.
    """

    def __init__(self, events: int, recent: int, horizon_s: float, sample: Callable[[K], int]) -> None:
        self._recent = recent
        self._horizon_s, self._sample = horizon_s, sample
        self._mask = 0  # a key is sampled where these bits of its sample number are 0
        self._size = events
        self._keys: list[K] = []  # this and the next three grow to `events` items, then the oldest is overwritten
        self._times, self._kinds = array("d"), array("B")
        self._gaps = array("d")  # seconds until the next use
        self._latest: dict[K, int] = {}
        self._next = self._seen = 0

    def used(self, key: K, kind: int, now: float) -> int:
        """A block was used, or offered for the first time; from now on it is of `kind`. Returns events taken so far."""
        if self._mask and self._sample(key) & self._mask:
            return self._seen
        if self._is_short(now):
            self._thin()
            if self._sample(key) & self._mask:
                return self._seen
        at = self._latest.get(key)
        if at is not None:
            self._gaps[at] = max(now - self._times[at], 0.0)
        self._write(key, kind, now, _UNUSED)
        self._seen += 1
        return self._seen

    def _is_short(self, now: float) -> bool:
        """Whether the ring is about to overwrite what is younger than the horizon."""
        return len(self._keys) == self._size and now - self._times[self._next] < self._horizon_s

    def uses(self, now: float) -> tuple[Floats, Floats]:
        """How many blocks were used lately in each bin of age, and how many were that old unused; both `[KINDS, BINS]`.

        A period life table: what counts is what happened since the last `recent` events, to blocks of any age.
        """
        if not self._keys:
            return np.zeros((KINDS, BINS)), np.zeros((KINDS, BINS))
        since, times, gaps = self._since(), np.frombuffer(self._times), np.frombuffer(self._gaps)
        used, lived = gaps >= 0, np.where(gaps >= 0, gaps, np.maximum(now - times, 0.0))
        lately = times + lived >= since
        times, used, lived = times[lately], used[lately], lived[lately]
        rows = np.frombuffer(self._kinds, np.uint8)[lately] * np.intp(BINS)
        entered = _tally(rows + age_bins(np.maximum(since - times, 0.0)))
        cells = rows + age_bins(lived)
        left, ended = _tally(cells), _tally(cells[used])
        reached = entered.cumsum(axis=1) - left.cumsum(axis=1) + left
        return ended, reached - (left - ended) / 2  # those whose age ends inside the bin were at risk for half of it

    def _since(self) -> float:
        """Time of the event that is `recent` events old."""
        back = min(self._recent, len(self._keys))
        return self._times[(self._next - back) % len(self._keys)]

    def _write(self, key: K, kind: int, time_s: float, gap_s: float) -> None:
        slot = self._next
        if slot == len(self._keys):
            self._keys.append(key)
            self._times.append(time_s)
            self._kinds.append(kind)
            self._gaps.append(gap_s)
        else:
            old = self._keys[slot]
            if self._latest.get(old) == slot:
                del self._latest[old]
            self._keys[slot], self._times[slot], self._kinds[slot], self._gaps[slot] = key, time_s, kind, gap_s
        self._latest[key] = slot
        self._next = (slot + 1) % self._size

    def _thin(self) -> None:
        """Halves the sample and drops the events of keys that left it."""
        self._mask = 2 * self._mask + 1
        order = [(self._next + step) % self._size for step in range(self._size)]
        events = [(self._keys[at], self._kinds[at], self._times[at], self._gaps[at]) for at in order]
        self._keys, self._latest, self._next = [], {}, 0
        self._times, self._kinds, self._gaps = array("d"), array("B"), array("d")
        for key, kind, time_s, gap_s in events:
            if not self._sample(key) & self._mask:
                self._write(key, kind, time_s, gap_s)


def _tally(cells: npt.NDArray[np.intp]) -> Floats:
    return np.bincount(cells, minlength=KINDS * BINS).reshape(KINDS, BINS).astype(np.float64)
