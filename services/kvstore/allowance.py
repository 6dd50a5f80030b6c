"""Allowance: how many bytes all reads together may keep in place. Knows numbers; knows no records and no memory."""

from __future__ import annotations

import asyncio
from collections import deque

from fabric.errors import Exhausted

MAX_WAITING = 256  # turns; whoever comes then is refused


class Allowance:
    """First come, first served. Who asks for more than there ever is gets all of it, alone."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def taken(self) -> int:
        """Bytes that are kept now."""
        return self._taken

    async def take(self, nbytes: int, timeout_s: float) -> int:
        """Waits for its turn and for so many bytes. Returns what to `give` back.

        Raises:
            TimeoutError: others kept theirs. Exhausted: too many wait already.
        """
        nbytes = min(nbytes, self.most_bytes)
        if self.take_now(nbytes):
            return nbytes
        if len(self._waiting) >= MAX_WAITING:
            raise Exhausted(f"{MAX_WAITING} reads wait already", field="get", fix="read later", retry_after_s=0.5)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, turn))
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException:
            if turn.cancelled():
                self._admit()
            else:  # it came just as it was given up
                self.give(nbytes)
            raise
        return nbytes

    def take_now(self, nbytes: int) -> bool:
        """Takes so many bytes if nobody waits and others keep no more than leaves room for them; whether it did."""
        has_room = not self._waiting and self._taken + nbytes <= self.most_bytes
        if has_room:
            self._taken += nbytes
        return has_room

    def give(self, nbytes: int) -> None:
        """Gives back what `take` returned."""
        self._taken -= nbytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            nbytes, turn = self._waiting[0]
            if not turn.done():
                if self._taken + nbytes > self.most_bytes:
                    return
                self._taken += nbytes
                turn.set_result(None)
            self._waiting.popleft()
