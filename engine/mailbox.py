"""Mailbox: the events of one request on their way to its reader. Knows its bound; lives on the event loop only."""

from __future__ import annotations

import asyncio
from collections import deque

from engine.events import Event, TokensOut, is_last


class Mailbox:
    """`full` and `drained` leave a gap, so that a reader at the bound does not pause and resume at every event."""

    def __init__(self, bound: int) -> None:
        self._bound, self._events = bound, deque[Event]()
        self._arrived = asyncio.Event()
        self.paused = False

    @property
    def full(self) -> bool:
        """Whether the request should pause until its reader has caught up."""
        return len(self._events) >= self._bound

    @property
    def drained(self) -> bool:
        """Whether a paused request may go on."""
        return len(self._events) <= self._bound // 2

    def put(self, event: Event) -> None:
        """Add an event."""
        self._events.append(event)
        self._arrived.set()

    async def get(self) -> Event:
        """The next event, waiting for it; token events that piled up come as one."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        while isinstance(event, TokensOut) and self._events and isinstance(self._events[0], TokensOut):
            event = _joined(event, self._events.popleft())
        return event

    @property
    def ended(self) -> bool:
        """Whether the last event of the request has arrived."""
        return bool(self._events) and is_last(self._events[-1])


def _joined(first: TokensOut, second: Event) -> TokensOut:
    assert isinstance(second, TokensOut)  # noqa: S101  narrows the type: the caller looked
    logprobs = None if first.logprobs is None or second.logprobs is None else (*first.logprobs, *second.logprobs)
    return TokensOut(first.request_id, first.first_index, (*first.token_ids, *second.token_ids), logprobs)
