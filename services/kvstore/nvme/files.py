"""Files: the segments of one directory, one of them written to. Knows bytes and places; knows no index and no policy.

Everything blocks: call it from worker threads. One thread appends and removes, any number read.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fabric.errors import StartError
from services.kvstore.nvme.format import (
    PAGE,
    PRELUDE_BYTES,
    Head,
    Stored,
    erased_bytes,
    head_bytes,
    pack_erased,
    pack_head,
    padded,
    parse_head,
)

Bytes = npt.NDArray[np.uint8]
_SUFFIX = ".segment"
_ERASE_BYTES = 1 << 20  # of one write of zeros


class Stream(Enum):
    """What is written apart: records of one stream are likely to leave at a time, and a segment with them."""

    NEW = "new"
    MOVED = "moved"  # out of a segment that was removed


class Place(NamedTuple):
    """Where a record lies: whole pages of one segment."""

    segment: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A record that is wanted: where it lies, its bytes, and where they go, the start of `room` (uint8).

    Room of whole pages, at the address of one, spares reads past the page cache a copy.
    """

    place: Place
    size: int
    room: Bytes

    @property
    def has_pages(self) -> bool:
        """Whether the room has whole pages for all of it."""
        return not self.room.ctypes.data % PAGE and len(self.room) >= padded(self.size)

    @property
    def target(self) -> Bytes:
        """Where the payload is read to, with its padding where there is room for that."""
        return self.room[: padded(self.size) if self.has_pages else self.size]


@dataclass(slots=True, eq=False)
class _Segment:
    path: Path
    descriptor: int
    reader: int  # the same, or past the page cache
    readers: int = 0
    removed: bool = False

    def close(self) -> None:
        for descriptor in {self.descriptor, self.reader}:
            os.close(descriptor)


class SegmentFiles:
    """Owns `folder` while it is open: a second owner, in this or another process, is refused.

    A directory may lie on a mounted volume that others see; each kvstore has its own. Where such a volume grants the
    lock to two all the same, each still appends only to segments that it made: their names are taken exclusively.
    """

    def __init__(self, folder: Path, segment_bytes: int, direct: bool) -> None:
        """direct: read past the page cache.

        Raises:
            StartError: the directory cannot be used, or has an owner.
        """
        self._folder, self.segment_bytes, self._direct = folder, segment_bytes, direct
        self._guard, self._own = threading.Lock(), threading.local()
        self._segments: dict[int, _Segment] = {}
        self._writing: dict[Stream, tuple[int, int]] = {}  # number and length of the segments that are appended to
        self._unsynced: set[int] = set()
        self._unlinked: dict[Path, bool] = {}  # removed since the folder was synced; False: still there
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StartError(
                f"{folder}: {error.strerror}", field="nvme_dir", fix="name a writable directory"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise refused(folder, error) from error
        for path in folder.glob(f"*{_SUFFIX}"):
            if path.stem.isdecimal():
                self._segments[int(path.stem)] = self._opened(path)
        self._next = max(self._segments, default=0) + 1

    @property
    def numbers(self) -> list[int]:
        """Segments, oldest first."""
        with self._guard:
            return sorted(self._segments)

    @property
    def writing(self) -> set[int]:
        """The segments that are appended to."""
        return {number for number, _ in self._writing.values()}

    def size(self, number: int) -> int:
        """Bytes of a segment."""
        with self._reading(number) as segment:
            return os.fstat(segment.descriptor).st_size

    def append(self, stored: Stored, payload: Bytes, stream: Stream = Stream.NEW) -> Place:
        """Writes one record at the end of the stream's newest segment, or of a new one where that is full.

        Raises:
            OSError: the disk is full, read-only or broken. What was written of the record is skipped by `scan`.
        """
        number, end = self._writing.get(stream, (0, self.segment_bytes))
        if end >= self.segment_bytes:
            number, end = self._create(), 0
            self._writing[stream] = number, end
        head = pack_head(stored, number)
        head = head.ljust(padded(len(head)), b"\0")
        nbytes = len(head) + padded(payload.nbytes)
        filler = bytes(nbytes - len(head) - payload.nbytes)
        self._unsynced.add(number)
        try:
            descriptor = self._segments[number].descriptor
            written = os.pwritev(descriptor, [head, payload.data, filler], end)
            if written != nbytes:
                raise OSError(errno.ENOSPC, "the disk took only a part of a record")
        except OSError:
            del self._writing[stream]  # whatever lies there now, nothing is appended behind it
            if end == 0:
                with suppress(OSError):
                    self.remove(number)  # nothing is in it, and a full disk would be asked again and again
            raise
        self._writing[stream] = number, end + nbytes
        return Place(number, end, nbytes)

    def sync(self) -> None:
        """Returns when what was appended outlives a loss of power. Raises OSError."""
        for number in sorted(self._unsynced):
            os.fdatasync(self._segments[number].descriptor)
            self._unsynced.discard(number)

    def read(self, place: Place) -> tuple[Head, Bytes] | None:
        """A record's head and payload, unchecked but for the head; None where the head is damaged or cut short. The
        payload stays until the same thread reads again.

        Raises:
            OSError: the device cannot read it. KeyError: the segment was removed.
        """
        raw = self._read(place.segment, place.offset, place.nbytes)
        head = parse_head(bytes(raw[: min(len(raw), PAGE)]), place.segment) or parse_head(raw.tobytes(), place.segment)
        if head is None or len(raw) < head.payload_at + head.stored.size:
            return None
        return head, raw[head.payload_at : head.payload_at + head.stored.size]

    def read_run(self, run: Sequence[Target]) -> list[Head | None]:
        """Records that follow each other in one segment: their heads, and their payloads where they belong, unchecked.
        None where a head is damaged, cut short, or of a record of another size.

        One read for all and no copy: past the page cache that takes whole pages of room, at the address of one.

        Raises:
            OSError: the device cannot read all of it. KeyError: the segment was removed.
        """
        befores = [each.place.nbytes - padded(each.size) for each in run]
        if min(befores) < PAGE or (self._direct and not all(each.has_pages for each in run)):
            return [self._copied_into(each) for each in run]
        first, packed = run[0].place, self._buffer(sum(befores) + PAGE)
        starts = [sum(befores[:index]) for index in range(len(run))]
        parts: list[memoryview] = []
        for each, start, before in zip(run, starts, befores, strict=True):
            target = each.target
            rest = packed[len(packed) - padded(each.size) + len(target) :] if len(target) < padded(each.size) else None
            parts += [packed[start : start + before].data, target.data, *([rest.data] if rest is not None else [])]
        with self._reading(first.segment) as segment:
            end = first.offset + os.preadv(segment.reader, parts, first.offset)
        # All of them before any is read again: that takes the memory they lie in.
        heads = [
            parse_head(packed[start : start + before].tobytes(), first.segment)
            for start, before in zip(starts, befores, strict=True)
        ]
        return [
            head
            if head is not None
            and (head.payload_at, head.stored.size) == (before, each.size)
            and end >= each.place.offset + before + each.size
            else self._copied_into(each)
            for each, head, before in zip(run, heads, befores, strict=True)
        ]

    def _copied_into(self, wanted: Target) -> Head | None:
        """The same of one record: of the first version, for memory of any address, after a read that was cut short."""
        read = self.read(wanted.place)
        if read is None or read[0].stored.size != wanted.size:
            return None
        np.copyto(wanted.room[: wanted.size], read[1])
        return read[0]

    def head(self, place: Place) -> Head | None:
        """A record's head alone; None where it is damaged.

        Raises:
            OSError: the device cannot read it. KeyError: the segment was removed.
        """
        return self._head(place.segment, place.offset)

    def erase(self, place: Place) -> None:
        """Overwrites a record, its head first; no scan finds it again once this returned. Readers see no record.

        Raises:
            OSError: the device cannot write it. KeyError: the segment was removed, and the record with it.
        """
        with self._reading(place.segment) as segment:
            os.pwrite(segment.descriptor, pack_erased(place.nbytes, place.segment), place.offset)
            os.fdatasync(segment.descriptor)
            for start in range(PAGE, place.nbytes, _ERASE_BYTES):
                os.pwrite(segment.descriptor, bytes(min(_ERASE_BYTES, place.nbytes - start)), place.offset + start)

    def scan(self, number: int) -> Iterator[tuple[Place, Head] | None]:
        """Every record of a segment in order, by its head; None for each stretch of pages that is none. Erased ones
        are stepped over.

        Raises:
            OSError: the device cannot read it.
        """
        offset, end, lost = 0, self.size(number), False
        while offset < end:
            head = self._head(number, offset)
            erased = erased_bytes(self._read(number, offset, PAGE).tobytes(), number) if head is None else None
            if erased is not None:
                lost, offset = False, offset + erased
                continue
            if head is None or offset + head.payload_at + head.stored.size > end:
                if not lost:
                    yield None
                lost, offset = True, offset + PAGE
                continue
            yield Place(number, offset, head.nbytes), head
            lost, offset = False, offset + head.nbytes

    def remove(self, number: int) -> None:
        """Deletes a segment; its bytes go once nobody reads it. Raises OSError where the disk does not let it go."""
        with self._guard:
            segment = self._segments.pop(number)
            segment.removed = True
            idle = segment.readers == 0
        self._unsynced.discard(number)
        self._writing = {stream: at for stream, at in self._writing.items() if at[0] != number}
        self._unlinked[segment.path] = False
        try:
            segment.path.unlink(missing_ok=True)
            self._unlinked[segment.path] = True
        finally:
            if idle:
                segment.close()

    def settle(self) -> None:
        """No start finds a segment again that was removed, once this returned. Raises OSError."""
        for path in [path for path, gone in self._unlinked.items() if not gone]:
            path.unlink(missing_ok=True)
        if self._unlinked:
            self._sync_folder()
        self._unlinked.clear()

    def close(self) -> None:
        """Gives the directory back; nobody may read any more."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        os.close(self._lock)

    def _head(self, number: int, offset: int) -> Head | None:
        first = self._read(number, offset, PAGE)
        length = head_bytes(first[:PRELUDE_BYTES].tobytes(), number)
        if length is None:
            return None
        packed = first if length <= len(first) else self._read(number, offset, padded(length))
        return parse_head(packed.tobytes(), number)

    def _create(self) -> int:
        number, self._next = self._next, self._next + 1
        path = self._folder / f"{number:012d}{_SUFFIX}"
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        self._sync_folder()  # or its name may be lost with the power, and all that is in it
        with self._guard:
            self._segments[number] = self._opened(path)
        return number

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _opened(self, path: Path) -> _Segment:
        """Writes go through the page cache, they are synced in batches."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            return _Segment(path, descriptor, os.open(path, os.O_RDONLY | os.O_DIRECT) if self._direct else descriptor)
        except OSError as error:
            os.close(descriptor)
            raise StartError(
                f"{path} cannot be read past the page cache", field="nvme_direct", fix="set --no-nvme-direct"
            ) from error

    @contextmanager
    def _reading(self, number: int) -> Iterator[_Segment]:
        with self._guard:
            segment = self._segments[number]
            segment.readers += 1
        try:
            yield segment
        finally:
            with self._guard:
                segment.readers -= 1
                over = segment.removed and segment.readers == 0
            if over:
                segment.close()

    def _read(self, number: int, offset: int, nbytes: int) -> Bytes:
        """At most `nbytes` bytes: fewer at the end of a file. They stay until the same thread reads again."""
        with self._reading(number) as segment:
            buffer = self._buffer(nbytes)
            return buffer[: _fill(segment.reader, buffer, offset)]

    def _buffer(self, nbytes: int) -> Bytes:
        """Memory of this thread, aligned as unbuffered reads want it: fresh pages would cost more than the reading."""
        kept: Bytes | None = getattr(self._own, "buffer", None)
        if kept is None or len(kept) < nbytes:
            kept = self._own.buffer = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        return kept[:nbytes]


def refused(folder: Path, error: OSError) -> StartError:
    """Why the lock of `folder` cannot be taken."""
    if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
        message, fix = f"{folder} belongs to another kvstore that runs", "give each kvstore a directory of its own"
    else:
        message = f"{folder} cannot be locked: {error.strerror}"
        fix = "mount it so that locks work, or name a directory of another file system"
    return StartError(message, field="nvme_dir", fix=fix)


def _fill(descriptor: int, buffer: Bytes, offset: int) -> int:
    """Reads until the buffer is full or the file ends."""
    at = 0
    while at < len(buffer):
        count = os.preadv(descriptor, [buffer[at:].data], offset + at)
        at += count
        if count == 0 or count % PAGE:
            break
    return at
