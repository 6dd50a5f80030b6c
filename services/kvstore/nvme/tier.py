"""NVMe tier: which records lie in the segments; written behind, read on demand. Knows room and age, no network.

An index in memory is all that makes a record visible; it is built anew from the segments at every start, newest first,
while the tier serves already. Room is made by segments, oldest first: of what was asked for since it was written a part
moves to the newest segment, the rest goes with the file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, KeysView, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from fabric.kvlink.verify import copy_rows
from fabric.telemetry import logs
from services.kvstore.nvme.files import Bytes, Place, SegmentFiles
from services.kvstore.nvme.format import Head, Stored
from services.kvstore.records import RecordId
from services.worker.together import settled

_log = logs.get("nvme")
MAX_QUEUED = 4096  # records that wait to be written; beyond, or beyond the bytes they may take, they are not
_BATCH = 64  # records between two syncs
_REST_S = 5.0  # after a failed write nobody writes for this long
_MOVED_SHARE = 0.5  # most of a segment that survives it: so that room is made


@dataclass(slots=True)
class _Entry:
    place: Place
    size: int
    used_at: float
    asked: bool = False  # since it was written


@dataclass(frozen=True, slots=True)
class _Waiting:
    stored: Stored
    payload: Bytes
    release: Callable[[], None]


@dataclass(slots=True)
class NvmeCounts:
    """What happened since the start."""

    written: int = 0
    dropped: int = 0  # not written: the queue was full, or the disk failed a moment ago
    failed: int = 0  # writes that the disk refused
    damaged: int = 0  # stretches and records that were not as they were written
    removed: int = 0  # records that left with their segment


@dataclass(frozen=True, slots=True)
class OnDisk:
    """One record as the index knows it; `used_at` in unix seconds."""

    size: int
    used_at: float


class NvmeTier:
    """All methods run in the event loop; the disk is touched by threads, one of which writes.

    Args:
        files: the segments.
        capacity_bytes: of all segments.
        retention_s: seconds after its last use for which a record may survive its segment.
        now: unix seconds.
        queue_bytes: most that waits to be written, or is being written: it cannot leave DRAM meanwhile. One record may
            always wait, whatever its size.
    """

    def __init__(
        self,
        files: SegmentFiles,
        capacity_bytes: int,
        retention_s: float,
        now: Callable[[], float],
        queue_bytes: int,
    ) -> None:
        self._files, self._capacity, self._retention_s, self._now = files, capacity_bytes, retention_s, now
        self._queue_bytes = queue_bytes
        self.waiting_bytes = 0  # of records that are offered and not yet written or dropped
        self._entries: dict[RecordId, _Entry] = {}
        self._members: dict[int, set[RecordId]] = {}
        self._sizes: dict[int, int] = {}
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue(MAX_QUEUED)
        self._rests_until = float("-inf")
        self._changing = asyncio.Lock()  # the segments: they are written, emptied and erased by one at a time
        self._unwanted: set[RecordId] = set()  # erased, perhaps before they were written
        self.counts = NvmeCounts()
        self.found: Callable[[list[RecordId]], None] = lambda records: None  # by recovery
        self.left: Callable[[list[RecordId]], None] = lambda records: None

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def ids(self) -> KeysView[RecordId]:
        """Names of all records, as they are now."""
        return self._entries.keys()

    @property
    def used(self) -> int:
        """Bytes of all segments."""
        return sum(self._sizes.values())

    def size_of(self, record: RecordId) -> int | None:
        """Bytes of a record that is here; None where it is not."""
        entry = self._entries.get(record)
        return entry.size if entry is not None else None

    @property
    def capacity(self) -> int:
        """Bytes that all segments may take."""
        return self._capacity

    @property
    def queued(self) -> int:
        """Records that wait to be written."""
        return self._queue.qsize()

    def known(self, record: RecordId) -> OnDisk | None:
        """What the index says of a record; None where it is not here."""
        entry = self._entries.get(record)
        return OnDisk(entry.size, entry.used_at) if entry is not None else None

    async def head(self, record: RecordId) -> Stored | None:
        """What the disk says of a record, its payload unread; None where it is not here, or its head is damaged."""
        entry = self._entries.get(record)
        return await settled(asyncio.to_thread(self._head, entry.place, record)) if entry is not None else None

    async def verify(self, record: RecordId) -> bool:
        """Reads a record again, which is no use of it. False where it was damaged: it is forgotten, and counted."""
        while (entry := self._entries.get(record)) is not None:
            target = np.empty(entry.size, np.uint8)
            if await settled(asyncio.to_thread(self._read, entry.place, record, target)) is not None:
                return True
            if self._entries.get(record) is entry:  # else it moved to another segment while it was read
                self._lost(record, entry)
                return False
        return True

    async def erase(self, records: Sequence[RecordId]) -> None:
        """Forgets records, those that wait to be written as well, and overwrites them: no restart finds them again.

        Raises:
            OSError: the disk did not take it; they are forgotten until the next start.
        """
        async with self._changing:
            self._unwanted.update(records)  # until the next batch: one may wait for this to end
            places = [self._entries[record].place for record in records if record in self._entries]
            for record in records:
                self.forget(record)
            await settled(asyncio.to_thread(self._erase_all, places))
        self.left(list(records))

    def offer(self, stored: Stored, payload: Bytes, release: Callable[[], None]) -> None:
        """Writes a record some time later, unless it is here. `payload` stays as it is until `release` is called."""
        if stored.id in self._entries or not self._takes(stored.size) or self._now() < self._rests_until:
            self.counts.dropped += stored.id not in self._entries
            release()
        else:
            self._unwanted.discard(stored.id)
            self.waiting_bytes += stored.size
            self._queue.put_nowait(_Waiting(stored, payload, release))

    async def fetch(self, wanted: Sequence[tuple[RecordId, Bytes]]) -> list[Stored | None]:
        """Copies records to their targets (uint8 [size] each), every digest checked on the copy.

        None for one that is not here (any more), or is damaged: that one is forgotten, and counted.
        """
        entries = [self._entries.get(record) for record, _ in wanted]
        places = [entry.place if entry is not None else None for entry in entries]
        read = await settled(asyncio.to_thread(self._read_all, places, wanted))
        for entry, (record, _), stored in zip(entries, wanted, read, strict=True):
            if stored is None:
                self._lost(record, entry)
            elif entry is not None:
                entry.used_at, entry.asked = self._now(), True
        return read

    def forget(self, record: RecordId) -> None:
        """Makes a record invisible; its bytes go with their segment. A restart may find it again."""
        entry = self._entries.pop(record, None)
        if entry is not None:
            self._members.get(entry.place.segment, set()).discard(record)

    async def run(self) -> None:
        """Finds what the segments hold, then writes what is offered, until cancelled."""
        async with self._changing:
            await self._recover()
        while True:
            batch = [await self._queue.get()]
            while len(batch) < _BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            try:
                async with self._changing:
                    await self._write(batch)
            finally:
                for _ in batch:
                    self._queue.task_done()

    async def drained(self) -> None:
        """Returns once nothing waits to be written."""
        await self._queue.join()

    def close(self) -> None:
        """Drops what still waits and gives the directory back; nobody reads or runs any more."""
        while not self._queue.empty():
            self._release([self._queue.get_nowait()])
        self._files.close()

    def _takes(self, size_bytes: int) -> bool:
        """Whether one more record may wait."""
        fits = not self.waiting_bytes or self.waiting_bytes + size_bytes <= self._queue_bytes
        return fits and not self._queue.full()

    def _release(self, records: Iterable[_Waiting]) -> None:
        for each in records:
            self.waiting_bytes -= each.stored.size
            each.release()

    async def _recover(self) -> None:
        for number in reversed(self._files.numbers):
            found = await settled(asyncio.to_thread(self._scan, number))
            self._sizes[number] = await asyncio.to_thread(self._files.size, number)
            for place, head in found:
                self._add(head.stored.id, _Entry(place, head.stored.size, head.stored.stored_at))
            self.found([head.stored.id for _, head in found])
        if self._entries:
            _log.info("records found on disk", records=len(self._entries), segments=len(self._sizes))

    def _scan(self, number: int) -> list[tuple[Place, Head]]:
        found: list[tuple[Place, Head]] = []
        try:
            for item in self._files.scan(number):
                if item is None:
                    self.counts.damaged += 1
                else:
                    found.append(item)
        except OSError as error:
            self.counts.damaged += 1
            _log.warning("a segment cannot be read to its end", segment=number, error=error.strerror)
        return found

    async def _write(self, batch: Sequence[_Waiting]) -> None:
        """The records, one sync, then room for the next ones; nothing is visible before it is on the disk."""
        new = [item for item in batch if item.stored.id not in self._entries and item.stored.id not in self._unwanted]
        if self._queue.empty():
            self._unwanted.clear()
        try:
            places = await settled(asyncio.to_thread(self._append, [(item.stored, item.payload) for item in new]))
        finally:
            self._release(batch)
        self._written([item.stored for item in new], places)
        await self._make_room()

    def _written(self, records: Sequence[Stored], places: Sequence[Place]) -> None:
        for stored, place in zip(records, places, strict=False):
            self._add(stored.id, _Entry(place, stored.size, stored.stored_at))
            self._sizes[place.segment] = max(self._sizes.get(place.segment, 0), place.offset + place.nbytes)
        self.counts.written += len(places)
        if len(places) < len(records):
            self.counts.failed += len(records) - len(places)
            self._rests_until = self._now() + _REST_S

    def _head(self, place: Place, record: RecordId) -> Stored | None:
        try:
            head = self._files.head(place)
        except (OSError, KeyError):
            return None
        return head.stored if head is not None and head.stored.id == record else None

    def _erase_all(self, places: Sequence[Place]) -> None:
        for place in places:
            with suppress(KeyError):  # it went with its segment
                self._files.erase(place)

    def _append(self, records: Iterable[tuple[Stored, Bytes]]) -> list[Place]:
        """As many as the disk takes."""
        places = []
        try:
            for stored, payload in records:
                places.append(self._files.append(stored, payload))
            self._files.sync()
        except OSError as error:
            _log.warning("the disk takes no records", error=error.strerror, rest_s=_REST_S)
        return places

    async def _make_room(self) -> None:
        """Removes the oldest segments until the others fit."""
        while self.used > self._capacity and len(self._sizes) > 1:
            oldest = min(number for number in self._sizes if number != self._files.writing)
            moved = self._survivors(oldest)
            used_at = {record: self._entries[record].used_at for record in moved}
            kept = await settled(asyncio.to_thread(self._moved, [self._entries[record].place for record in moved]))
            gone = set(self._members.pop(oldest, ()))
            for record in gone:
                del self._entries[record]
            del self._sizes[oldest]
            await settled(asyncio.to_thread(self._files.remove, oldest))
            self._written([stored for stored, _ in kept], [place for _, place in kept])
            for stored, _ in kept:
                self._entries[stored.id].used_at = used_at[stored.id]
                gone.discard(stored.id)
            self.counts.removed += len(gone)
            self.left(list(gone))

    def _survivors(self, number: int) -> list[RecordId]:
        """What was asked for and is not too old, the newest first, up to a share of the segment."""
        horizon, room = self._now() - self._retention_s, _MOVED_SHARE * self._sizes[number]
        asked = [(self._entries[record].used_at, record) for record in self._members.get(number, ())
                 if self._entries[record].asked and self._entries[record].used_at > horizon]  # fmt: skip
        chosen = []
        for _, record in sorted(asked, key=lambda pair: -pair[0]):
            room -= self._entries[record].place.nbytes
            if room < 0:
                break
            chosen.append(record)
        return chosen

    def _moved(self, places: Sequence[Place]) -> list[tuple[Stored, Place]]:
        """Records appended anew. Their payloads are as they were, sound or not: a read tells."""
        kept = []
        try:
            for place in places:
                read = self._files.read(place)
                if read is not None:
                    kept.append((read[0].stored, self._files.append(read[0].stored, read[1])))
        except OSError as error:
            _log.warning("records were not moved", error=error.strerror)
        return kept

    def _read_all(
        self, places: Sequence[Place | None], wanted: Sequence[tuple[RecordId, Bytes]]
    ) -> list[Stored | None]:
        return [
            self._read(place, record, target) if place is not None else None
            for place, (record, target) in zip(places, wanted, strict=True)
        ]

    def _read(self, place: Place, record: RecordId, target: Bytes) -> Stored | None:
        """The record, its bytes verified in `target`; None where anything of it is not as it was written."""
        try:
            read = self._files.read(place)
        except (OSError, KeyError):
            return None
        if read is None or read[0].stored.id != record or read[0].stored.size != len(target):
            return None
        stored, payload = read[0].stored, read[1]
        rows = [(each.offset, each.size, each.digest, target[each.offset : each.end]) for each in stored.extents]
        return stored if copy_rows(payload, rows) is None else None

    def _add(self, record: RecordId, entry: _Entry) -> None:
        """The newest of several wins: recovery comes from the newest segment to the oldest."""
        known = self._entries.get(record)
        if known is not None and known.place > entry.place:
            return
        self.forget(record)
        self._entries[record] = entry
        self._members.setdefault(entry.place.segment, set()).add(record)

    def _lost(self, record: RecordId, entry: _Entry | None) -> None:
        """Damage, unless the record left or moved while it was read."""
        if entry is not None and self._entries.get(record) is entry:
            self.counts.damaged += 1
            self.forget(record)
            self.left([record])
