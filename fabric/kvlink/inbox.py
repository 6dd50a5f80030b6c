"""Notices on their way to their one consumer: bounded, in order. Knows no transport."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from fabric.kvlink.link import Notice

CAPACITY = 4096


class Inbox:
    """A queue that can be closed. A transport that finds no room stops taking: a notice is never dropped."""

    def __init__(self) -> None:
        self._notices: deque[Notice] = deque()
        self._changed = asyncio.Event()
        self._space = asyncio.Event()
        self._space.set()
        self._closed = False

    @property
    def room(self) -> int:
        """How many more to take; may be read from any thread."""
        return CAPACITY - len(self._notices)

    async def put(self, notice: Notice) -> None:
        """Waits for room."""
        await self._space.wait()
        self.put_now([notice])

    def put_now(self, notices: list[Notice]) -> None:
        """For a transport that asked for `room` before it took these."""
        self._notices.extend(notices)
        self._changed.set()
        if self.room <= 0:
            self._space.clear()

    def close(self) -> None:
        """The iterator ends after the notices that are already here."""
        self._closed = True
        self._changed.set()
        self._space.set()

    async def __aiter__(self) -> AsyncIterator[Notice]:
        while True:
            while self._notices:
                notice = self._notices.popleft()
                self._space.set()
                yield notice
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()
