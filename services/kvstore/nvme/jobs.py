"""Jobs: what threads do with segment files. Each blocks; none of them knows an index, and none fails with the disk."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from fabric.kvlink.verify import digest
from fabric.telemetry import logs
from services.kvstore.nvme.files import Bytes, Place, SegmentFiles, Stream, Target
from services.kvstore.nvme.format import Head, Stored
from services.kvstore.records import RecordId

_log = logs.get("nvme")
_RUN, _RUN_BYTES = 256, 16 << 20  # most records, and bytes, of one read: each takes three of 1,024 buffers
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def scan(files: SegmentFiles, number: int) -> tuple[list[tuple[Place, Head]], int]:
    """The records of a segment by their heads, and how many stretches of it are none."""
    found: list[tuple[Place, Head]] = []
    damaged = 0
    try:
        for item in files.scan(number):
            if item is None:
                damaged += 1
            else:
                found.append(item)
    except OSError as error:
        damaged += 1
        _log.warning("a segment cannot be read to its end", segment=number, error=error.strerror)
    return found, damaged


@dataclass(frozen=True, slots=True)
class Appended:
    """`places` of as many as the disk took; not `synced`: they may be lost, or be found by the next start. `full`: it
    took no more for it has no room."""

    places: list[Place]
    synced: bool
    full: bool


def append(files: SegmentFiles, records: Sequence[tuple[Stored, Bytes]]) -> Appended:
    """Appends records and syncs them."""
    places: list[Place] = []
    full = False
    try:
        for stored, payload in records:
            places.append(files.append(stored, payload))
    except OSError as error:
        full = error.errno in _FULL
        _log.warning("the disk takes no records", error=error.strerror)
    return Appended(places, _is_synced(files), full)


def move(files: SegmentFiles, records: Sequence[tuple[Place, float]]) -> tuple[list[tuple[Stored, Place]], bool]:
    """Records appended anew, with the time of their last use; and whether they were synced. Payloads are as they were,
    sound or not: a read tells."""
    moved: list[tuple[Stored, Place]] = []
    try:
        for place, used_at in records:
            read = files.read(place)
            if read is not None:
                stored = read[0].stored.used(used_at)
                moved.append((stored, files.append(stored, read[1], Stream.MOVED)))
    except OSError as error:
        _log.warning("records were not moved", error=error.strerror)
    return moved, _is_synced(files)


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A record, its bytes, and where they go: see `Target`."""

    record: RecordId
    size: int
    room: Bytes


def read_all(files: SegmentFiles, places: Sequence[Place | None], wanted: Sequence[Wanted]) -> list[Stored | None]:
    """The records, their bytes verified where they belong; None for one without a place, and where anything of it is
    not as it was written. Neighbours on the disk are read at once."""
    found: list[Stored | None] = [None] * len(wanted)
    there = [
        (index, Target(place, each.size, each.room))
        for index, (place, each) in enumerate(zip(places, wanted, strict=True))
        if place is not None
    ]
    for run in _runs(there):
        for (index, _), head in zip(run, _heads(files, [target for _, target in run]), strict=True):
            found[index] = _sound(head, wanted[index])
    return found


def read(files: SegmentFiles, place: Place, wanted: Wanted) -> Stored | None:
    """`read_all` of one."""
    return read_all(files, [place], [wanted])[0]


def _runs(targets: Sequence[tuple[int, Target]]) -> list[list[tuple[int, Target]]]:
    """Neighbours together, as many as one read takes."""
    runs: list[list[tuple[int, Target]]] = []
    end, size = (0, 0), 0
    for index, target in targets:
        place = target.place
        if (
            not runs
            or (place.segment, place.offset) != end
            or size + place.nbytes > _RUN_BYTES
            or len(runs[-1]) == _RUN
        ):
            runs.append([])
            size = 0
        runs[-1].append((index, target))
        end, size = (place.segment, place.offset + place.nbytes), size + place.nbytes
    return runs


def _heads(files: SegmentFiles, run: Sequence[Target]) -> list[Head | None]:
    """Heads of neighbours, one by one where they cannot be read together: the device may fail at one of them alone."""
    try:
        return files.read_run(run)
    except (OSError, KeyError):
        return [None] if len(run) == 1 else [head for each in run for head in _heads(files, [each])]


def _sound(head: Head | None, wanted: Wanted) -> Stored | None:
    if head is None or head.stored.id != wanted.record:
        return None
    sound = all(digest(wanted.room[each.offset : each.end]) == each.digest for each in head.stored.extents)
    return head.stored if sound else None


def head(files: SegmentFiles, place: Place, record: RecordId) -> Stored | None:
    """What the disk says of a record, its payload unread; None where that is damaged or of another one."""
    try:
        found = files.head(place)
    except (OSError, KeyError):
        return None
    return found.stored if found is not None and found.stored.id == record else None


def remove(files: SegmentFiles, number: int) -> None:
    """Deletes a segment. One that cannot be deleted is found again by the next start."""
    try:
        files.remove(number)
    except OSError as error:
        _log.warning("a segment cannot be deleted", segment=number, error=error.strerror)


def erase(files: SegmentFiles, places: Sequence[Place]) -> None:
    """Overwrites records, and has removed segments gone for good. Raises OSError where the disk does not take it."""
    files.settle()
    for place in places:
        with suppress(KeyError):  # it went with its segment
            files.erase(place)


def _is_synced(files: SegmentFiles) -> bool:
    try:
        files.sync()
    except OSError as error:
        _log.warning("the disk does not say that it holds what was written", error=error.strerror)
        return False
    return True
