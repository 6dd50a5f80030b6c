"""The sending half of pipelined transfers: those that are open, and how each ends. Knows links, no models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fabric.errors import DeadlineExceeded, InvalidArgument
from fabric.kvlink import messages
from fabric.kvlink.leftovers import to_its_end
from fabric.kvlink.link import Link, Notice
from fabric.kvlink.messages import FromReceiver
from fabric.kvlink.pieces import Piece, Pieces
from fabric.kvlink.readers import Readers
from fabric.kvlink.sending import LinkUse, Outgoing
from fabric.kvlink.turns import SendLimits, Turns
from fabric.records import Landing
from fabric.telemetry import logs

__all__ = ["Outgoing", "Piece", "Pieces", "SendLimits", "Sender"]

_log = logs.get("kvlink")
# Takes what is left to do for a transfer, and runs it to its end.
Leave = Callable[[Coroutine[Any, Any, None]], None]


class Sender:
    """All transfers that leave by one link. Feed it the link's notices; it runs in the link's event loop."""

    def __init__(self, link: Link, limits: SendLimits) -> None:
        self.link, self.limits = link, limits
        self._use = LinkUse(link, limits, Turns(link, limits), Readers())
        self._open: dict[str, Outgoing] = {}

    @asynccontextmanager
    async def transfer(
        self, landing: Landing, total_bytes: int | None = None, leave: Leave | None = None
    ) -> AsyncIterator[Outgoing]:
        """One transfer into `landing`, of `total_bytes` bytes where that is known: what fits whole needs no credit.

        At the end of the block, unless the last chunk was sent, the receiver is told that no more will be written, or
        that a write which was given up may still be on its way. The block waits for that, and for a write that is
        under way; given `leave`, neither it nor a `send` that is cancelled waits: what is left goes there, and until
        it ended nothing that was sent may change. It fails where a write may arrive even after that, and where the
        receiver refuses what a `send` that returned early left to be taken.

        Raises:
            InvalidArgument: a transfer into this landing is open.
        """
        if landing.id in self._open:
            raise InvalidArgument(f"a transfer into {landing.id} is open", field="landing")
        outgoing = self._open[landing.id] = Outgoing(self._use, landing, total_bytes, waits=leave is None)
        try:
            yield outgoing
        finally:
            if outgoing.finished:
                del self._open[landing.id]
            elif leave is None:
                await to_its_end(self._ended(outgoing, landing))
            else:
                leave(self._left(outgoing, landing))

    async def _ended(self, outgoing: Outgoing, landing: Landing) -> None:
        try:
            try:
                await outgoing.settle()
            finally:
                await outgoing.end()
        finally:
            del self._open[landing.id]

    async def _left(self, outgoing: Outgoing, landing: Landing) -> None:
        """As `_ended`. Raises DeadlineExceeded where a write that was given up may still arrive, and what the receiver
        refused the transfer for after its last `send` returned early."""
        await self._ended(outgoing, landing)
        if outgoing.left_early and outgoing.refused is not None:
            raise outgoing.refused
        if outgoing.in_doubt:
            raise DeadlineExceeded(f"a write into {landing.id} was given up and may still arrive")

    async def give_up(self, landing: Landing) -> None:
        """Tells the receiver that nothing will be written into a landing for which no transfer was begun. One that is
        open, by another request with the same ticket, says itself how it ends."""
        if landing.id in self._open:
            return
        async with self.transfer(landing):
            pass

    def noticed(self, notice: Notice) -> bool:
        """Takes what a receiver says; False for another notice. A malformed one is logged and dropped."""
        if not messages.is_for_sender(notice.payload):
            return False
        try:
            message = messages.unpack(notice.payload)
            outgoing = self._open.get(message.transfer)
            if outgoing is not None and isinstance(message, FromReceiver):
                outgoing.told(notice, message)
        except InvalidArgument as error:
            _log.warning("notice dropped", peer=notice.peer, reason=error.message)
        return True
