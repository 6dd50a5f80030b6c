"""Mirror: the keys in one worker's cache, as its stream tells them, and whether these are all. Knows no network."""

from __future__ import annotations

from collections.abc import Callable, Set
from enum import StrEnum

from protos.deepinfer.v1 import common_pb2

MAX_HELD_KEYS = 1 << 18
# A worker that cannot be followed is not asked for all its keys again and again.
_SNAPSHOT_PAUSE_S = 1.0


class Knowledge(StrEnum):
    """EXACT: the keys are those of the newest version that was told. DEGRADED: some may be missing or gone."""

    EXACT = "exact"
    DEGRADED = "degraded"


class Doubt(StrEnum):
    """Why keys are not known exactly."""

    UNTOLD = "untold"  # no whole set came yet
    GAP = "gap"  # a difference counts from a version that never came
    INCARNATION = "incarnation"  # a status of another life
    OVERFLOW = "overflow"  # more keys than are mirrored


class Mirror:
    """Of the life that `epoch` names. `clock` gives monotonic seconds; `doubted` is told why exactness was lost."""

    def __init__(self, epoch: int, clock: Callable[[], float], doubted: Callable[[Doubt], None]) -> None:
        self._epoch, self._clock, self._doubted = epoch, clock, doubted
        self._held: set[bytes] = set()
        self._version = self._newest = 0
        self._doubt: Doubt | None = Doubt.UNTOLD
        self._heard_at = clock()
        self._whole_at = float("-inf")

    @property
    def held(self) -> Set[bytes]:
        return self._held

    def knowledge(self, stale_s: float) -> Knowledge:
        """What the keys are worth now; a stream that says nothing for `stale_s` may have lost what came last."""
        heard = self._clock() - self._heard_at <= stale_s
        return Knowledge.EXACT if self._doubt is None and heard else Knowledge.DEGRADED

    @property
    def wants_whole(self) -> bool:
        """Whether following the worker anew would help: it tells the whole set first."""
        again = self._clock() - self._whole_at >= _SNAPSHOT_PAUSE_S
        return self._doubt in (Doubt.GAP, Doubt.INCARNATION) and again

    def take(self, status: common_pb2.WorkerStatus) -> None:
        """The keys of one status; what comes twice or too late changes nothing."""
        if status.epoch != self._epoch:
            self._doubt_it(Doubt.INCARNATION)
            return
        self._heard_at = self._clock()
        if status.keys_reset:
            self._take_whole(status)
        elif status.keys_version > self._version:
            self._take_difference(status)

    def _take_whole(self, status: common_pb2.WorkerStatus) -> None:
        if status.keys_version < self._newest:
            return
        self._held = set(status.keys_added[:MAX_HELD_KEYS])
        self._version = self._newest = status.keys_version
        self._whole_at = self._clock()
        self._doubt = None
        if len(status.keys_added) > MAX_HELD_KEYS:
            self._doubt_it(Doubt.OVERFLOW)

    def _take_difference(self, status: common_pb2.WorkerStatus) -> None:
        """In doubt it is better than nothing, but no version of the worker's."""
        self._newest = max(self._newest, status.keys_version)
        if status.keys_base != self._version:
            self._doubt_it(Doubt.GAP)
        elif self._doubt is None:
            self._version = status.keys_version
        self._held.difference_update(status.keys_removed)
        room = MAX_HELD_KEYS - len(self._held)
        self._held.update(status.keys_added[:room])
        if len(status.keys_added) > room:
            self._doubt_it(Doubt.OVERFLOW)

    def _doubt_it(self, doubt: Doubt) -> None:
        """The first reason stays until the whole set comes."""
        if self._doubt is None:
            self._doubt = doubt
            self._doubted(doubt)
