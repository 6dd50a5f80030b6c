"""Announcer: keeps the index true of what this instance holds. Knows keys, times and rates; holds no records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fabric.telemetry import logs
from services.kvstore.index import Index, IndexLost, Tier

MAX_CHANGED = 65_536  # keys that wait to be told; beyond, everything is told anew
_BATCH = 512  # keys of one call
_RENEWALS = 3  # how often an entry is renewed within its time to live
_MARKS = 6  # how often a mark is renewed within its own
_log = logs.get("index")


@dataclass(frozen=True, slots=True)
class Pace:
    """`keys_per_s` bounds what is told anew, not what changes."""

    ttl_s: float  # of the index's entries
    keys_per_s: float
    mark_s: float = 5.0  # between two looks at the own mark: so late a lost index is noticed at most
    rest_s: float = 5.0  # after the index did not answer


@dataclass(slots=True)
class AnnouncerCounts:
    """Keys told, withdrawn and told anew, whole passes over everything held, and calls without an answer."""

    announced: int = 0
    withdrawn: int = 0
    reannounced: int = 0
    passes: int = 0
    lost: int = 0


class Announcer:
    """Tells what changed at once, and everything anew where the index lost it and before its entries expire.

    What it tells of a key is what `where` says at that moment, in one call after the other: the last word is the truth.
    """

    def __init__(self, index: Index, instance: str, run: str, pace: Pace, clock: Callable[[], float]) -> None:
        self._index, self._instance, self._run, self._pace, self._clock = index, instance, run, pace, clock
        self.where: Callable[[bytes], Tier | None] = lambda key: None
        self.held: Callable[[], Iterable[bytes]] = lambda: ()
        self.counts = AnnouncerCounts()
        self._changed: dict[bytes, None] = {}
        self._backlog: list[bytes] = []
        self._telling = 0
        self._woken = asyncio.Event()
        self._marks_at = self._renews_at = self._backlog_at = float("-inf")

    def changed(self, keys: Sequence[bytes]) -> None:
        """These came, left or moved between tiers: tell soon."""
        self._changed.update(dict.fromkeys(keys))
        if len(self._changed) > MAX_CHANGED:
            self._changed.clear()
            self._renews_at = float("-inf")
        self._woken.set()

    @property
    def waiting(self) -> int:
        """Keys that are still to be told, or are being told."""
        return len(self._changed) + len(self._backlog) + self._telling

    async def run(self) -> None:
        """Tells until cancelled."""
        answered = True
        while True:
            try:
                await self.step()
                answered = True
            except IndexLost:
                self.counts.lost += 1
                if answered:
                    _log.warning("the KV index does not answer; hits of other instances are lost meanwhile")
                answered = False
                await asyncio.sleep(self._pace.rest_s)
            else:
                await self._wait()

    async def leave(self) -> None:
        """Takes the mark back: nobody is pointed here any more."""
        with suppress(IndexLost):
            await self._index.unmark(self._instance, self._run)

    async def step(self) -> None:
        """Marks, and tells one batch of what is due. Raises IndexLost; then nothing is forgotten."""
        await self._mark()
        if self._clock() >= self._renews_at:
            self._start_over()
        if changed := [key for key, _ in zip(self._changed, range(_BATCH), strict=False)]:
            self.counts.announced += await self._tell(changed)
        if self._backlog and self._clock() >= self._backlog_at:
            again = self._backlog[-_BATCH:]
            self._backlog_at = self._clock() + len(again) / self._pace.keys_per_s
            self.counts.reannounced += await self._tell(again)
            del self._backlog[-len(again) :]

    async def _mark(self) -> None:
        if self._clock() < self._marks_at:
            return
        if not await self._index.mark(self._instance, self._run, _MARKS * self._pace.mark_s):
            self._renews_at = float("-inf")
        self._marks_at = self._clock() + self._pace.mark_s

    def _start_over(self) -> None:
        self._backlog = list(self.held())
        self._renews_at = self._clock() + self._pace.ttl_s / _RENEWALS
        self.counts.passes += 1
        _log.info("everything held is announced", keys=len(self._backlog))

    async def _tell(self, keys: Sequence[bytes]) -> int:
        """The truth of each of `keys`, which count as told unless they change meanwhile. Returns how many are held."""
        for key in keys:
            self._changed.pop(key, None)
        told = {key: self.where(key) for key in keys}
        held = {key: tier for key, tier in told.items() if tier is not None}
        gone = [key for key, tier in told.items() if tier is None]
        self._telling = len(keys)
        try:
            await self._index.publish(held, self._instance, self._run)
            await self._index.withdraw(gone, self._instance)
        except IndexLost:
            self.changed(keys)
            raise
        finally:
            self._telling = 0
        self.counts.withdrawn += len(gone)
        return len(held)

    async def _wait(self) -> None:
        """Until there is more to tell, or the next mark is due."""
        if self._changed:
            return
        due = min(self._marks_at, self._renews_at, self._backlog_at if self._backlog else float("inf"))
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, due - self._clock())):
                self._woken.clear()
                await self._woken.wait()
