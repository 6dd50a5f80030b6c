"""Telling: progress on its way to a caller. Knows the order of messages; the work never waits for any but the last."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

ProgressT = TypeVar("ProgressT")


class Telling(Generic[ProgressT]):
    """One message at a time, in order. Of each type only the newest waits, and none for longer than the work lasts."""

    def __init__(self, report: Callable[[ProgressT], Awaitable[None]]) -> None:
        self._report = report
        self._waiting: dict[type, ProgressT] = {}
        self._sending: asyncio.Task[None] | None = None

    def tell(self, progress: ProgressT) -> None:
        """Sends `progress` when it is its turn. Raises what sending an earlier one met."""
        self._waiting[type(progress)] = progress
        if self._sending is not None and self._sending.done():
            self._sending.result()
            self._sending = None
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(), name="telling")

    async def finish(self, last: ProgressT) -> None:
        """Sends the last message at once: what still waits is overtaken by it. Raises what sending met."""
        self._waiting.clear()
        if self._sending is not None:
            await self._sending
        await self._report(last)

    async def close(self) -> None:
        """Stops; safe to repeat."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def _send(self) -> None:
        while self._waiting:
            await self._report(self._waiting.pop(next(iter(self._waiting))))
