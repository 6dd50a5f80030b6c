"""Mailbox: the events of one request on their way to its reader. Knows its bound; lives on the event loop only.

To wake a reader for every token of every stream takes time from the steps: a reader may ask for portions. One leaves
with the step that makes it due, so that a step wakes all its readers at once; no timer fires while steps go on.
"""

from __future__ import annotations

import asyncio
from collections import deque

from engine.events import Event, TokensOut, is_last

# A portion leaves with the step that comes this share of the time early, and without another step this share late.
_EARLY, _LATE = 0.25, 0.5


class Mailbox:
    """`full` and `drained` leave a gap, so that a reader at the bound does not pause and resume at every event."""

    def __init__(self, bound: int, gather_s: float = 0.0) -> None:
        """gather_s: seconds between two portions of tokens, about; the first is due so long after this was made."""
        self._bound, self._events = bound, deque[Event]()
        self._arrived = asyncio.Event()
        self._loop, self._gather_s = asyncio.get_running_loop(), gather_s
        self._due_at = self._loop.time() + gather_s
        self._overdue: asyncio.TimerHandle | None = None
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
        if self._arrived.is_set():
            return
        early_s = self._due_at - self._loop.time() if isinstance(event, TokensOut) else 0.0
        if early_s <= _EARLY * self._gather_s:
            self._arrived.set()
        elif self._overdue is None:
            self._overdue = self._loop.call_later(early_s + _LATE * self._gather_s, self._arrived.set)

    async def get(self) -> Event:
        """The next event, waiting for it; token events that piled up come as one."""
        await self._arrived.wait()
        event = self._events.popleft()
        while isinstance(event, TokensOut) and self._events and isinstance(self._events[0], TokensOut):
            event = _joined(event, self._events.popleft())
        if not self._events:
            self._arrived.clear()
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
        self._due_at = self._loop.time() + self._gather_s
        return event

    @property
    def ended(self) -> bool:
        """Whether the last event of the request has arrived."""
        return bool(self._events) and is_last(self._events[-1])


def _joined(first: TokensOut, second: Event) -> TokensOut:
    assert isinstance(second, TokensOut)  # noqa: S101  narrows the type: the caller looked
    logprobs = None if first.logprobs is None or second.logprobs is None else (*first.logprobs, *second.logprobs)
    return TokensOut(first.request_id, first.first_index, (*first.token_ids, *second.token_ids), logprobs)
