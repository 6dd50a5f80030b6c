"""NVMe tier: records in segment files, written behind, read on demand. Knows when to write, move, remove; no network.

An index in memory is all that makes a record visible; it is built anew from the segments at every start, newest first,
while the tier serves already. Room is made by segments: of the one of which least is wanted that moves to a newer one,
at most half of it, and the rest goes with the file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, KeysView, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from fabric.retention import RetentionClass
from fabric.telemetry import logs
from services.kvstore.nvme import jobs
from services.kvstore.nvme.files import Bytes, Place, SegmentFiles
from services.kvstore.nvme.format import Stored
from services.kvstore.nvme.index import Entry, SegmentIndex
from services.kvstore.nvme.jobs import Wanted
from services.kvstore.nvme.waiting import Waiting, WriteQueue
from services.kvstore.policy.budget import Budgets, Owner
from services.kvstore.policy.retention import BY_CLASS, Retention
from services.kvstore.policy.traits import ALONE, Arrival
from services.kvstore.records import RecordId, RecordKind
from services.worker.together import settled

_log = logs.get("nvme")
_BATCH = 64  # records between two syncs
_REST_S = 5.0  # after a failed write nobody writes for this long
_MOVED_SHARE = 0.5  # most of a segment that survives it: so that removing one makes room, and writes at most double
_SWEEP_S = 60.0  # between two looks for what nobody used


@dataclass(slots=True)
class NvmeCounts:
    """What happened since the start."""

    written: int = 0
    moved: int = 0  # written again, because their segment was removed
    dropped: int = 0  # not written: the queue was full, or the disk failed a moment ago
    failed: int = 0  # writes that the disk refused
    damaged: int = 0  # stretches and records that were not as they were written
    removed: int = 0  # records that left with their segment
    expired: int = 0  # records that nobody used for the time of their class


@dataclass(frozen=True, slots=True)
class OnDisk:
    """One record as the index knows it; `used_at` in unix seconds."""

    size: int
    used_at: float
    retention: RetentionClass


class NvmeTier:
    """All methods run in the event loop; the disk is touched by threads, one of which writes.

    Args:
        files: the segments.
        capacity_bytes: of all segments.
        now: unix seconds.
        queue_bytes: most that waits to be written, or is being written: it cannot leave DRAM meanwhile. One record may
            always wait, whatever its size.
        retention: how long what nobody uses is kept.
        budgets: of what may be promised; by default nothing.
    """

    def __init__(
        self,
        files: SegmentFiles,
        capacity_bytes: int,
        now: Callable[[], float],
        queue_bytes: int,
        retention: Retention = BY_CLASS,
        budgets: Budgets | None = None,
    ) -> None:
        self._files, self._now, self._retention = files, now, retention
        self.capacity = capacity_bytes
        self._budgets = budgets or Budgets(0, 0)
        self._index = SegmentIndex(capacity_bytes, retention, self._budgets)
        self._queue = WriteQueue(queue_bytes)
        self._rests_until = float("-inf")
        self._changing = asyncio.Lock()  # the segments: they are written, emptied and erased by one at a time
        self._unwanted: set[RecordId] = set()  # erased, perhaps before they were written
        self.counts = NvmeCounts()
        self.found: Callable[[list[RecordId]], None] = lambda records: None  # by recovery
        self.left: Callable[[list[RecordId]], None] = lambda records: None
        # Asked of what was written: whose promise it has above, and for how long after each use.
        self.promise_of: Callable[[RecordId], tuple[Owner, float] | None] = lambda record: None

    def __len__(self) -> int:
        return len(self._index)

    @property
    def ids(self) -> KeysView[RecordId]:
        """Names of all records, as they are now."""
        return self._index.ids

    @property
    def used(self) -> int:
        """Bytes of all segments."""
        return self._index.used

    @property
    def queued(self) -> int:
        """Records that wait to be written."""
        return len(self._queue)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of records that wait or are being written."""
        return self._queue.nbytes

    def size_of(self, record: RecordId) -> int | None:
        """Bytes of a record that is here; None where it is not."""
        entry = self._index.get(record)
        return entry.size if entry is not None else None

    def known(self, record: RecordId) -> OnDisk | None:
        """What the index says of a record; None where it is not here."""
        entry = self._index.get(record)
        return OnDisk(entry.size, entry.used_at, entry.retention) if entry is not None else None

    def wants(self, record: RecordId) -> bool:
        """Whether a record is neither here nor on its way."""
        return self._index.get(record) is None and record not in self._queue

    def touch(self, prefix: Iterable[RecordId]) -> None:
        """A prefix was used, from its start, in whatever tier: what is hot above is not cold here."""
        self._index.touch(prefix, self._now())

    def refresh(self, prefix: Iterable[RecordId], older_s: float) -> None:
        """The same of what of it was not used for `older_s`."""
        now = self._now()
        entries = ((record, self._index.get(record)) for record in prefix)
        self.touch([record for record, entry in entries if entry is not None and now - entry.used_at >= older_s])

    def retain(self, keys: Sequence[bytes], keep_s: float, budget_bytes: int, owner: Owner) -> dict[RecordId, int]:
        """Has others leave first for `keep_s` after each use. Returns the bytes of each record retained.

        `keys` of a prefix from its start. Those beyond `budget_bytes`, or the owner's whole budget, are left out, as is
        what nothing wants any more.
        """
        chosen: dict[RecordId, int] = {}
        left = min(budget_bytes, self._budgets.owner_bytes)
        for record in (RecordId(kind, key) for key in keys for kind in RecordKind):
            size = self.size_of(record)
            if size is not None and size <= left:
                chosen[record] = size
                left -= size
        now = self._now()
        kept = {}
        for record, size in reversed(chosen.items()):
            kept_s = self._retention.scaled(keep_s, record.kind is RecordKind.ANCHOR)
            if self._index.promise(record, owner, kept_s, now):
                kept[record] = size
        return kept

    def offer(self, stored: Stored, payload: Bytes, release: Callable[[], None], arrival: Arrival = ALONE) -> None:
        """Writes a record some time later, unless it is here or on its way. `payload` stays as it is until `release` is
        called."""
        if not self.wants(stored.id):
            release()
            return
        rests = self._now() < self._rests_until
        if rests or not self._queue.put(Waiting(stored, payload, release, arrival)):
            self.counts.dropped += 1
            release()
        else:
            self._unwanted.discard(stored.id)

    async def fetch(self, wanted: Sequence[Wanted]) -> list[Stored | None]:
        """Copies records to where they belong, every digest checked on the copy. No use of them yet.

        None for one that is not here (any more), or is damaged: that one is forgotten, and counted.
        """
        entries = [self._index.get(one.record) for one in wanted]
        places = [entry.place if entry is not None else None for entry in entries]
        read = await settled(asyncio.to_thread(jobs.read_all, self._files, places, wanted))
        for entry, place, one, stored in zip(entries, places, wanted, read, strict=True):
            if stored is None and entry is not None and entry.place == place:
                self._lost(one.record, entry)
        return read

    async def head(self, record: RecordId) -> Stored | None:
        """What the disk says of a record, its payload unread; None where it is not here, or its head is damaged."""
        entry = self._index.get(record)
        if entry is None:
            return None
        return await settled(asyncio.to_thread(jobs.head, self._files, entry.place, record))

    async def verify(self, record: RecordId) -> bool:
        """Reads a record again, which is no use of it. False where it was damaged: it is forgotten, and counted."""
        while (entry := self._index.get(record)) is not None:
            place, wanted = entry.place, Wanted(record, entry.size, np.empty(entry.size, np.uint8))
            if await settled(asyncio.to_thread(jobs.read, self._files, place, wanted)) is not None:
                return True
            if entry.place == place and self._lost(record, entry):  # else it moved or left while it was read
                return False
        return True

    async def erase(self, records: Sequence[RecordId]) -> None:
        """Forgets records, those that wait to be written as well, and overwrites every copy: no restart finds them.

        Raises:
            OSError: the disk did not take it; they are forgotten until the next start.
        """
        async with self._changing:
            self._unwanted.update(records)  # until the next batch: one may wait for this to end
            places = self._index.copies(records)
            for record in records:
                self.forget(record)
            await settled(asyncio.to_thread(jobs.erase, self._files, places))
            self._index.erased(places)
        self.left(list(records))

    def forget(self, record: RecordId) -> None:
        """Makes a record invisible; its bytes go with their segment. A restart may find it again."""
        self._index.forget(record, self._now())

    async def run(self) -> None:
        """Finds what the segments hold, then writes what is offered and forgets what is idle, until cancelled."""
        async with self._changing:
            await self._recover()
        while True:
            batch: list[Waiting] = []
            with suppress(TimeoutError):
                async with asyncio.timeout(_SWEEP_S):
                    batch = await self._queue.take(_BATCH)
            try:
                async with self._changing:
                    await self._write(batch)
                    self._expire()
                    await self._make_room()
            finally:
                self._queue.done(batch)

    async def drained(self) -> None:
        """Returns once nothing waits to be written."""
        await self._queue.drained()

    async def finish(self, timeout_s: float) -> None:
        """Returns once nothing waits to be written, or when that takes too long: a stop must not lose what it can keep,
        nor wait for a disk that stalls."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.drained()
        except TimeoutError:
            _log.warning("records were not written before the end", records=self.queued)

    def close(self) -> None:
        """Drops what still waits and gives the directory back; nobody reads or runs any more."""
        self._queue.clear()
        self._files.close()

    async def _recover(self) -> None:
        for number in reversed(self._files.numbers):
            found, damaged = await settled(asyncio.to_thread(jobs.scan, self._files, number))
            self._index.grow(number, await asyncio.to_thread(self._files.size, number))
            self.counts.damaged += damaged
            for place, head in found:
                self._index.restore(head.stored, place, self._now())
            self.found([head.stored.id for _, head in found])
        if len(self):
            _log.info("records found on disk", records=len(self), segments=len(self._index.segments))

    async def _write(self, batch: Sequence[Waiting]) -> None:
        """The records and one sync; nothing is visible before it is on the disk."""
        new = [
            item for item in batch if self._index.get(item.stored.id) is None and item.stored.id not in self._unwanted
        ]
        if not self.queued:
            self._unwanted.clear()
        try:
            records = [(item.stored, item.payload) for item in new]
            done = await settled(asyncio.to_thread(jobs.append, self._files, records))
        finally:
            self._queue.release(batch)
        now = self._now()
        for item, place in zip(new, done.places, strict=False):
            if done.synced:
                self._index.add(item.stored, place, now, item.arrival)
                if (promise := self.promise_of(item.stored.id)) is not None:
                    self._index.promise(item.stored.id, *promise, now)
            else:
                self._index.copied(item.stored.id, place)
        written = len(done.places) if done.synced else 0
        self.counts.written += written
        if written < len(new):
            self.counts.failed += len(new) - written
            self._rests_until = now + _REST_S
        if done.full:
            self._shrink()

    def _shrink(self) -> None:
        """The disk is full before the tier is: what it has is all that it gets, and a segment must go for the next."""
        self.capacity = max(self.used - self._files.segment_bytes, self._files.segment_bytes)
        self._index.resize(self.capacity)
        _log.warning("the disk is full: the tier takes less from now on", capacity_bytes=self.capacity)

    def _expire(self) -> None:
        expired = self._index.expire(self._now())
        self.counts.expired += len(expired)
        if expired:
            self.left(expired)

    async def _make_room(self) -> None:
        """Removes segments of which nothing is left, then those of which least is wanted until the others fit."""
        self._index.trim(self._now())
        while (victim := self._index.victim(self._files.writing)) is not None:
            if self.used <= self.capacity and not self._index.is_empty(victim):
                break
            await self._move(self._index.survivors(victim, _MOVED_SHARE, self._now()))
            await self._remove(victim)

    async def _move(self, places: Sequence[tuple[Place, float]]) -> None:
        if not places:
            return
        moved, synced = await settled(asyncio.to_thread(jobs.move, self._files, places))
        for stored, place in moved:
            if synced:
                self._index.move(stored.id, place)
            else:
                self._index.copied(stored.id, place)
        self.counts.moved += len(moved) if synced else 0

    async def _remove(self, number: int) -> None:
        gone = self._index.remove(number, self._now())
        await settled(asyncio.to_thread(jobs.remove, self._files, number))
        self.counts.removed += len(gone)
        if gone:
            self.left(gone)

    def _lost(self, record: RecordId, entry: Entry) -> bool:
        """Damage, unless the record left while it was read."""
        if self._index.get(record) is not entry:
            return False
        self.counts.damaged += 1
        self.forget(record)
        self.left([record])
        return True
