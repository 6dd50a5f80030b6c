"""Waiting: records on their way to the disk, bounded by count and bytes. Each stays in DRAM until it is released."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.kvstore.nvme.files import Bytes
from services.kvstore.nvme.format import Stored
from services.kvstore.policy.traits import Arrival
from services.kvstore.records import RecordId

MAX_QUEUED = 4096  # records that wait to be written; beyond, or beyond the bytes they may take, they are not


@dataclass(frozen=True, slots=True)
class Waiting:
    stored: Stored
    payload: Bytes
    release: Callable[[], None]
    arrival: Arrival


class WriteQueue:
    """One task takes batches; what it took counts as waiting until it is released."""

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: of all that wait. One record may always wait, whatever its size."""
        self._most_bytes = most_bytes
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue(MAX_QUEUED)
        self._ids: set[RecordId] = set()
        self.nbytes = 0

    def __len__(self) -> int:
        """Records that nobody took yet."""
        return self._queue.qsize()

    def __contains__(self, record: object) -> bool:
        """Whether a record waits or is being written."""
        return record in self._ids

    def put(self, waiting: Waiting) -> bool:
        """False, and nothing taken, where it does not fit."""
        fits = not self.nbytes or self.nbytes + waiting.stored.size <= self._most_bytes
        if not fits or self._queue.full():
            return False
        self._ids.add(waiting.stored.id)
        self.nbytes += waiting.stored.size
        self._queue.put_nowait(waiting)
        return True

    async def take(self, most: int) -> list[Waiting]:
        """The oldest ones, at least one: tell `done` of them."""
        batch = [await self._queue.get()]
        while len(batch) < most and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        return batch

    def release(self, records: Iterable[Waiting]) -> None:
        """Their bytes are no longer needed."""
        for each in records:
            self._ids.discard(each.stored.id)
            self.nbytes -= each.stored.size
            each.release()

    def done(self, records: Iterable[Waiting]) -> None:
        """They are on the disk, or never will be."""
        for _ in records:
            self._queue.task_done()

    async def drained(self) -> None:
        """Returns once everything is done."""
        await self._queue.join()

    def clear(self) -> None:
        """Lets go of what nobody took."""
        while not self._queue.empty():
            self.release([self._queue.get_nowait()])
