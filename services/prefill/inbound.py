"""Inbound: what a caller says while its prefill runs. Knows messages; runs nothing of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from fabric.errors import Cancelled, InvalidArgument
from protos.deepinfer.v1 import prefill_pb2 as pb
from services.prefill import wire
from services.prefill.ask import TicketGrant


class Inbound:
    """The messages after `start`: at most one attach, whose ticket resolves `ticket`, and perhaps a cancel."""

    def __init__(self, requests: AsyncIterator[pb.PrefillRequest]) -> None:
        self._requests = requests
        self.ticket: asyncio.Future[TicketGrant] = asyncio.get_running_loop().create_future()

    async def during(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` while listening. However this ends, `work` has ended before.

        Raises:
            Cancelled: the caller sent cancel. InvalidArgument: it sent what does not belong there.
        """
        job, reader = asyncio.ensure_future(work), asyncio.ensure_future(self._read())
        try:
            await asyncio.wait((job, reader), return_when=asyncio.FIRST_COMPLETED)
            if not job.done() and await reader:
                raise Cancelled("the caller sent cancel")
            await job
        finally:
            for task in (job, reader, self.ticket):
                task.cancel()
            await asyncio.gather(job, reader, self.ticket, return_exceptions=True)

    async def _read(self) -> bool:
        """Whether the caller sent cancel before it closed its side."""
        async for message in self._requests:
            match message.WhichOneof("message"):
                case "attach" if not self.ticket.done():
                    self.ticket.set_result(wire.unpack_ticket(message.attach.ticket))
                case "cancel":
                    return True
                case found:
                    raise InvalidArgument(f"{found} has no place here", field="message", fix="send start, then attach")
        if not self.ticket.done():
            self.ticket.set_exception(InvalidArgument("no ticket was attached", field="attach", fix="send one"))
        return False
