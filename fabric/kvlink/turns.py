"""Turns: whose chunk may be written next over a link, so that bytes in flight stay bounded. Knows no transfers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fabric.errors import DeadlineExceeded
from fabric.kvlink.credit import FairQueue, Flow, Turn
from fabric.kvlink.link import Link, Write
from fabric.records import LinkAddress


@dataclass(frozen=True, slots=True)
class SendLimits:
    """chunk_bytes: of one push. in_flight_bytes: of all pushes of the link at a time. timeout_s: of every single wait,
    for credit, for a turn and for a push."""

    chunk_bytes: int = 4 << 20
    in_flight_bytes: int = 16 << 20
    timeout_s: float = 30.0


class Turns:
    """Fair turns of all transfers of one link; it runs in the link's event loop."""

    def __init__(self, link: Link, limits: SendLimits) -> None:
        self._link, self._timeout_s = link, limits.timeout_s
        self._queue = FairQueue(limits.in_flight_bytes)
        self._begun: dict[Turn, asyncio.Future[None]] = {}

    def push_at_once(self, flow: Flow, size: int, address: LinkAddress, writes: Sequence[Write], notify: bytes) -> bool:
        """Sends a chunk if that needs no waiting, of the link or for a turn; whether it did."""
        done = self._queue.has_room(size) and self._link.push_at_once(address, writes, notify=notify)
        if done:
            self._queue.passed(flow, size)
        return done

    async def turn(self, flow: Flow, size: int) -> Callable[[], None]:
        """Waits until a chunk of `size` bytes may go. Returns what gives the turn back, to be called once.

        Raises:
            DeadlineExceeded: others did not finish in time.
        """
        turn = self._queue.join(flow, size)
        begun = self._begun[turn] = asyncio.get_running_loop().create_future()
        try:
            self._admit()
            if not begun.done():
                await self._in_time(begun)
        except BaseException:
            self._leave(turn)
            raise
        return partial(self._leave, turn)

    async def _in_time(self, begun: asyncio.Future[None]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await begun
        except TimeoutError as error:
            raise DeadlineExceeded(f"no turn to send after {self._timeout_s:.3g} s") from error

    def _leave(self, turn: Turn) -> None:
        del self._begun[turn]
        self._queue.leave(turn)
        self._admit()

    def _admit(self) -> None:
        for turn in self._queue.admit():
            if not self._begun[turn].done():
                self._begun[turn].set_result(None)
