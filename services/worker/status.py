"""Worker status for `Watch` and for metrics: the newest one for everybody. Knows how to notice change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from engine.stats import EngineStats
from fabric.errors import Exhausted

MAX_WATCHERS = 64


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is. `outside` requests are in its hands but not (or not any more) in the engine's queues."""

    engine: EngineStats
    outside: int
    draining: bool


@dataclass(frozen=True, slots=True)
class Status:
    """A load with its place in this instance's sequence of statuses."""

    sequence: int
    load: Load


class StatusBoard:
    """Looks at the load every `period_s` and wakes its watchers on a change. A slow watcher skips to the newest."""

    def __init__(self, first: Load, look: Callable[[], Awaitable[Load]], period_s: float) -> None:
        self._look, self._period_s = look, period_s
        self.now = Status(1, first)
        self._changed = asyncio.Condition()
        self._watchers = 0

    async def run(self) -> None:
        """Observes until cancelled."""
        while True:
            await self.observe()
            await asyncio.sleep(self._period_s)

    async def observe(self) -> None:
        """Takes one look and publishes a change."""
        load = await self._look()
        if load != self.now.load:
            async with self._changed:
                self.now = Status(self.now.sequence + 1, load)
                self._changed.notify_all()

    async def watch(self) -> AsyncIterator[Status]:
        """The status now and after each change, without a backlog.

        Raises:
            Exhausted: too many watch already.
        """
        if self._watchers >= MAX_WATCHERS:
            raise Exhausted(f"{self._watchers} watchers already", fix="share one Watch stream per caller")
        self._watchers += 1
        try:
            seen = 0
            while True:
                seen = await self._beyond(seen)
                yield self.now
        finally:
            self._watchers -= 1

    async def _beyond(self, seen: int) -> int:
        async with self._changed:
            await self._changed.wait_for(lambda: self.now.sequence > seen)
            return self.now.sequence
