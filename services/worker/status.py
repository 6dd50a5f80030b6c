"""Worker status for `Watch` and for metrics: the newest one for everybody. Knows how to notice change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from engine.errors import EngineError
from engine.runner import EngineRunner
from engine.stats import EngineStats
from fabric.errors import Exhausted
from fabric.telemetry import logs

MAX_WATCHERS = 64
_IDLE_PERIODS = 20
# What came with the same step or call goes first: a status may be so much older, a request should not wait for it.
_YIELD_S = 0.005
_log = logs.get("status")


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is. `outside` requests are in its hands but not (or not any more) in the engine's queues."""

    engine: EngineStats
    outside: int
    keys: frozenset[bytes]  # of the blocks in its prefix cache
    draining: bool = False  # it finishes what it has and wants no more


@dataclass(frozen=True, slots=True)
class Status:
    """A load with its place in this instance's sequence, and how its keys differ from the watcher's last status."""

    sequence: int
    load: Load
    added: frozenset[bytes] = frozenset()
    removed: frozenset[bytes] = frozenset()
    reset: bool = False  # `added` is the whole set


class EngineBoard:
    """Looks at the engine every `period_s` while it has work, and when poked; wakes its watchers on a change.

    A slow watcher skips to the newest status. An idle worker looks seldom: a look wakes the engine's thread.
    """

    def __init__(self, engine: EngineRunner, outside: Callable[[EngineStats], int], period_s: float) -> None:
        self._engine, self._outside, self._period_s = engine, outside, period_s
        self._draining = False
        self.now = Status(1, self._load(*self._read()))
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
        await self._publish(self._load(*reading))

    async def drain(self) -> None:
        """Tells every watcher that this worker wants no more work, without waiting for the engine's next step."""
        self._draining = True
        await self._publish(replace(self.now.load, draining=True))

    async def _publish(self, load: Load) -> None:
        if load != self.now.load:
            async with self._changed:
                self.now = Status(self.now.sequence + 1, load)
                self._changed.notify_all()

    async def _rest(self) -> None:
        busy = self.now.load.outside or self.now.load.engine.running or self.now.load.engine.waiting
        with suppress(TimeoutError):
            async with asyncio.timeout(self._period_s if busy else _IDLE_PERIODS * self._period_s):
                await self._poked.wait()
                await asyncio.sleep(_YIELD_S)
        self._poked.clear()

    async def watch(self) -> AsyncIterator[Status]:
        """The status now and after each change, without a backlog.

        Raises:
            Exhausted: too many watch already.
        """
        if self._watchers >= MAX_WATCHERS:
            raise Exhausted(f"{self._watchers} watchers already", fix="share one Watch stream per caller")
        self._watchers += 1
        try:
            sent: Status | None = None
            while True:
                await self._beyond(sent.sequence if sent else 0)
                sent = _following(sent, self.now)
                yield sent
        finally:
            self._watchers -= 1

    async def _beyond(self, seen: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.now.sequence > seen)

    def _read(self) -> tuple[EngineStats, frozenset[bytes]]:
        """On the engine's thread."""
        engine = self._engine.engine
        return engine.stats(), engine.memory.index.keys

    def _load(self, stats: EngineStats, keys: frozenset[bytes]) -> Load:
        return Load(stats, self._outside(stats), keys, self._draining)


def _following(sent: Status | None, now: Status) -> Status:
    """`now` for a watcher that was last sent `sent`."""
    if sent is None:
        return replace(now, added=now.load.keys, reset=True)
    before, after = sent.load.keys, now.load.keys
    return replace(now, added=after - before, removed=before - after)
