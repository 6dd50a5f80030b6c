"""Worker status for `Watch` and for metrics: the newest one for everybody. Knows how to notice change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from engine.errors import EngineError
from engine.journal import Changes
from engine.runner import EngineRunner
from engine.stats import EngineStats
from fabric.errors import Exhausted
from fabric.telemetry import logs
from services.worker.history import KeyChange, KeyHistory

MAX_WATCHERS = 64
BEAT_S = 2.0  # after which a watcher is told what did not change
_IDLE_PERIODS = 20
# What came with the same step or call goes first: a status may be so much older, a request should not wait for it.
_YIELD_S = 0.005
_log = logs.get("status")


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is. `outside` requests are in its hands but not (or not any more) in the engine's queues."""

    engine: EngineStats
    outside: int
    draining: bool = False  # it finishes what it has and wants no more


@dataclass(frozen=True, slots=True)
class Status:
    """A load with its place in this instance's sequence, and how the keys differ from what its watcher has."""

    sequence: int
    load: Load
    keys: KeyChange


@dataclass(frozen=True, slots=True)
class _Reading:
    """What the engine's thread said; `keys` is everything that its cache holds, where that was asked for."""

    stats: EngineStats
    changes: Changes
    keys: frozenset[bytes] | None = None


class EngineBoard:
    """Looks at the engine every `period_s` while it has work, and when poked; wakes its watchers on a change.

    A slow watcher skips to the newest status. An idle worker looks seldom: a look wakes the engine's thread. What did
    not change is told again after a while, if there was a look since: silence means that nobody knows.
    """

    def __init__(self, engine: EngineRunner, outside: Callable[[EngineStats], int], period_s: float) -> None:
        self._engine, self._outside, self._period_s = engine, outside, period_s
        self._draining = False
        first = self._read_all()
        self._sequence, self.load = 1, self._load(first.stats)
        self._history = KeyHistory(first.keys or (), first.changes.version)
        self._looks = 0
        self._changed = asyncio.Condition()
        self._watchers = 0
        self._poked = asyncio.Event()

    def poke(self) -> None:
        """A request came or went: look now."""
        self._poked.set()

    async def run(self) -> None:
        """Observes until cancelled."""
        while True:
            try:
                await self.observe()
            except EngineError as error:  # the newest known status stays; health tells that the engine stands still
                _log.warning("the engine did not tell its load", error=type(error).__name__)
            await self._rest()

    async def observe(self) -> None:
        """Takes one look and publishes a change."""
        reading = await self._engine.call(self._read)
        await asyncio.sleep(_YIELD_S)
        before = self._history.version
        if not self._history.apply(reading.changes):  # a look before this one was not waited for
            reading = await self._engine.call(self._read_all)
            self._history = KeyHistory(reading.keys or (), reading.changes.version)
        self._looks += 1
        await self._publish(self._load(reading.stats), self._history.version != before)

    async def drain(self) -> None:
        """Tells every watcher that this worker wants no more work, without waiting for the engine's next step."""
        self._draining = True
        await self._publish(replace(self.load, draining=True), False)

    async def _publish(self, load: Load, keys_changed: bool) -> None:
        if load != self.load or keys_changed:
            async with self._changed:
                self._sequence, self.load = self._sequence + 1, load
                self._changed.notify_all()

    async def _rest(self) -> None:
        busy = self.load.outside or self.load.engine.running or self.load.engine.waiting
        with suppress(TimeoutError):
            idle_s = min(_IDLE_PERIODS * self._period_s, BEAT_S / 2)  # a beat needs a look
            async with asyncio.timeout(self._period_s if busy else max(self._period_s, idle_s)):
                await self._poked.wait()
                await asyncio.sleep(_YIELD_S)
        self._poked.clear()

    async def watch(self) -> AsyncIterator[Status]:
        """The status now, after each change and every BEAT_S, without a backlog.

        Raises:
            Exhausted: too many watch already.
        """
        if self._watchers >= MAX_WATCHERS:
            raise Exhausted(f"{self._watchers} watchers already", fix="share one Watch stream per caller")
        self._watchers += 1
        try:
            sent: Status | None = None
            while True:
                await self._news(sent.sequence if sent else 0)
                keys = self._history.since(sent.keys.version if sent else None)
                sent = Status(self._sequence, self.load, keys)
                yield sent
        finally:
            self._watchers -= 1

    async def _news(self, seen: int) -> None:
        """Until the status is another one than `seen`, or BEAT_S passed and the engine was looked at meanwhile."""
        looks = self._looks
        while self._sequence <= seen:
            try:
                async with asyncio.timeout(BEAT_S), self._changed:
                    await self._changed.wait_for(lambda: self._sequence > seen)
            except TimeoutError:
                if self._looks > looks:
                    return

    def _read(self) -> _Reading:
        """On the engine's thread."""
        engine = self._engine.engine
        return _Reading(engine.stats(), engine.memory.index.journal.take())

    def _read_all(self) -> _Reading:
        """On the engine's thread."""
        return replace(self._read(), keys=self._engine.engine.memory.index.keys)

    def _load(self, stats: EngineStats) -> Load:
        return Load(stats, self._outside(stats), self._draining)
