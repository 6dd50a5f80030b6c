"""Worker status for `Watch`: the newest one for every watcher. Knows how to notice change; knows no engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from fabric.errors import Exhausted

MAX_WATCHERS = 64


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is."""

    running: int
    waiting: int
    queued_tokens: int
    blocks_total: int
    blocks_free: int
    steps: int
    draining: bool


@dataclass(frozen=True, slots=True)
class Status:
    """A load with its place in this instance's sequence of statuses."""

    sequence: int
    load: Load


class StatusBoard:
    """Looks at the load every `period_s` and wakes its watchers on a change. A slow watcher skips to the newest."""

    def __init__(self, look: Callable[[], Load], period_s: float) -> None:
        self._look, self._period_s = look, period_s
        self._current = Status(1, look())
        self._changed = asyncio.Condition()
        self._watchers = 0

    async def run(self) -> None:
        """Observes until cancelled."""
        while True:
            await self.observe()
            await asyncio.sleep(self._period_s)

    async def observe(self) -> None:
        """Takes one look and publishes a change."""
        load = self._look()
        if load != self._current.load:
            async with self._changed:
                self._current = Status(self._current.sequence + 1, load)
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
                async with self._changed:
                    await self._changed.wait_for(lambda: self._current.sequence > seen)  # noqa: B023
                    current = self._current
                seen = current.sequence
                yield current
        finally:
            self._watchers -= 1
