"""Admission: how many requests are worked on and who is next. Knows tenants and counts, no request and no worker."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fabric.errors import Exhausted

_RETRY_S = 1.0


class Admission:
    """At most `limit()` at a time; those that wait are admitted one per tenant in turn, oldest first.

    The limit follows the workers: what they cannot hold waits here, in fair order, and is not refused there.
    """

    def __init__(self, limit: Callable[[], int], max_queued: int, max_queued_per_tenant: int) -> None:
        self._limit = limit
        self._max_queued, self._max_queued_per_tenant = max_queued, max_queued_per_tenant
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self.inflight = 0
        self.queued = 0
        self.served = 0

    @asynccontextmanager
    async def admit(self, tenant: str) -> AsyncIterator[None]:
        """Holds one place while the body runs.

        Raises:
            Exhausted: at once, where too many wait already.
        """
        await self._enter(tenant)
        try:
            yield
        finally:
            self.inflight -= 1
            self.served += 1
            self._wake()

    async def _enter(self, tenant: str) -> None:
        if self.inflight < self._limit() and not self.queued:
            self.inflight += 1
            return
        place = self._queue(tenant)
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._forget(tenant, place)
            else:  # admitted in the very moment of giving up
                self.inflight -= 1
                self._wake()
            raise

    def _queue(self, tenant: str) -> asyncio.Future[None]:
        queue = self._queues.get(tenant, deque())
        if self.queued >= self._max_queued or len(queue) >= self._max_queued_per_tenant:
            raise Exhausted("too many requests wait", fix="retry later", retry_after_s=_RETRY_S)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(place)
        self._queues[tenant] = queue
        self.queued += 1
        return place

    def _forget(self, tenant: str, place: asyncio.Future[None]) -> None:
        queue = self._queues.get(tenant, deque())
        if place in queue:
            queue.remove(place)
            self.queued -= 1
            if not queue:
                del self._queues[tenant]

    def _wake(self) -> None:
        while self._queues and self.inflight < self._limit():
            tenant, queue = self._queues.popitem(last=False)
            place = queue.popleft()
            if queue:
                self._queues[tenant] = queue
            self.queued -= 1
            if not place.done():
                self.inflight += 1
                place.set_result(None)
