"""The NVMe tier may miss and never lies: what it gives back was checked where it was copied to."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from fabric.lifecycle import background
from fabric.retention import RetentionClass
from services.kvstore.nvme import waiting
from services.kvstore.nvme.files import SegmentFiles
from services.kvstore.nvme.format import PAGE
from services.kvstore.nvme.jobs import Wanted
from services.kvstore.nvme.tier import NvmeTier
from services.kvstore.records import RecordId
from tests.support.clock import FakeClock
from tests.unit.services.kvstore.test_nvme_files import SIZE, payload, stored

SEGMENT = 16 * PAGE  # four records


@asynccontextmanager
async def opened(folder: Path, clock: FakeClock, segments: int = 100) -> AsyncIterator[NvmeTier]:
    files = SegmentFiles(folder, SEGMENT, direct=False)
    tier = NvmeTier(files, segments * SEGMENT, now=clock, queue_bytes=1 << 30)
    try:
        async with background(tier.run(), "nvme"):
            yield tier
    finally:
        tier.close()


async def wrote(tier: NvmeTier, *indices: int) -> None:
    for index in indices:
        tier.offer(stored(index), payload(index), lambda: None)
    async with asyncio.timeout(10.0):
        await tier.drained()


async def read(tier: NvmeTier, index: int) -> np.ndarray | None:
    target = np.zeros(SIZE, np.uint8)
    (found,) = await tier.fetch([Wanted(stored(index).id, SIZE, target)])
    assert found is None or found.used(0.0) == stored(index).used(0.0)
    return target if found is not None else None


async def until(condition) -> None:
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110 - the state belongs to code that announces it to nobody
            await asyncio.sleep(0.001)


async def test_records_are_there_once_they_are_written_and_after_a_restart(tmp_path):
    clock, released = FakeClock(), []
    async with opened(tmp_path, clock) as tier:
        tier.offer(stored(1), payload(1), lambda: released.append(1))
        assert tier.size_of(stored(1).id) is None and not released  # nothing is visible before it is on the disk
        await wrote(tier, 2, 3)
        assert released == [1] and len(tier) == 3 and tier.size_of(stored(1).id) == SIZE
        assert (await read(tier, 1) == payload(1)).all()
    async with opened(tmp_path, clock) as tier:
        announced: list[RecordId] = []
        tier.found = announced.extend
        await until(lambda: len(tier) == 3)
        assert {record.key[0] for record in announced} == {1, 2, 3}
        for index in (1, 2, 3):
            assert (await read(tier, index) == payload(index)).all()


async def test_every_flipped_byte_of_a_payload_is_a_counted_miss(tmp_path):
    async with opened(tmp_path, FakeClock()) as tier:
        left: list[RecordId] = []
        tier.left = left.extend
        for index, at in ((1, 0), (2, SIZE // 2 - 1), (3, SIZE - 1)):
            await wrote(tier, index)
            place = tier._index.get(stored(index).id).place
            head, _ = tier._files.read(place)
            with (tmp_path / f"{place.segment:012d}.segment").open("r+b") as file:
                file.seek(place.offset + head.payload_at + at)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))
            assert await read(tier, index) is None and await read(tier, index) is None
            assert tier.size_of(stored(index).id) is None
        assert tier.counts.damaged == 3 and [record.key[0] for record in left] == [1, 2, 3]
        await wrote(tier, 1)  # the same record may be stored anew
        assert (await read(tier, 1) == payload(1)).all()


async def test_a_record_of_another_name_at_its_place_is_a_miss(tmp_path):
    async with opened(tmp_path, FakeClock()) as tier:
        await wrote(tier, 1, 2)
        tier._index.get(stored(1).id).place = tier._index.get(stored(2).id).place
        assert await read(tier, 1) is None and (await read(tier, 2) == payload(2)).all()


async def test_room_is_made_by_the_oldest_and_what_was_asked_for_stays(tmp_path):
    clock = FakeClock()
    clock.now = 5_000.0
    async with opened(tmp_path, clock, segments=3) as tier:
        left: list[RecordId] = []
        tier.left = left.extend
        await wrote(tier, *range(1, 6))
        await read(tier, 2)
        for index in range(6, 40):
            clock.advance(10.0)
            await wrote(tier, index)
            if index % 4 == 0:
                assert await read(tier, 2) is not None, index
                tier.touch([stored(2).id])
            assert tier.used <= 4 * SEGMENT
        assert await read(tier, 1) is None and (await read(tier, 39) == payload(39)).all()
        gone = {record.key[0] for record in left}
        assert 2 not in gone and gone.isdisjoint(record.key[0] for record in tier.ids)
        assert len(gone) == tier.counts.removed
        assert 0 < tier.counts.moved <= tier.counts.written  # nothing is written more than twice on average
        assert sum(path.stat().st_size for path in tmp_path.glob("*.segment")) == tier.used


async def test_what_nobody_used_for_the_time_of_its_class_leaves_and_a_hit_starts_it_anew(tmp_path):
    clock, hour = FakeClock(5_000.0), 3600.0
    async with opened(tmp_path, clock) as tier:
        chat = replace(stored(2), retention=RetentionClass.CHAT)
        tier.offer(chat, payload(2), lambda: None)
        await wrote(tier, 1, 3)
        clock.advance(71 * hour)
        tier.touch([stored(3).id])
        clock.advance(2 * hour)
        await wrote(tier, 4)
        assert {record.key[0] for record in tier.ids} == {2, 3, 4} and tier.counts.expired == 1
        clock.advance(71 * hour)
        await wrote(tier, 5)
        assert {record.key[0] for record in tier.ids} == {2, 4, 5}


async def test_a_restart_forgets_no_class_and_no_age(tmp_path):
    clock, hour = FakeClock(5_000.0), 3600.0
    default, chat = (replace(stored(n), stored_at=5_000.0, retention=list(RetentionClass)[n]) for n in (0, 1))
    async with opened(tmp_path, clock) as tier:
        tier.offer(default, payload(0), lambda: None)
        tier.offer(chat, payload(1), lambda: None)
        await wrote(tier)
    clock.advance(80 * hour)
    async with opened(tmp_path, clock) as tier:
        await wrote(tier, 6)
        assert len(tier) == 2 and tier.known(stored(6).id) and tier.counts.expired == 1


async def test_a_segment_of_which_nothing_is_left_is_removed(tmp_path):
    clock = FakeClock(5_000.0)
    async with opened(tmp_path, clock) as tier:
        await wrote(tier, *range(1, 16))
        before = len(list(tmp_path.glob("*.segment")))
        clock.advance(80 * 3600.0)
        await wrote(tier, 20)
        assert before > 2 and len(tier) == 1 and len(list(tmp_path.glob("*.segment"))) == 1


async def test_a_disk_that_takes_nothing_costs_hits_and_recovers(tmp_path, monkeypatch):
    clock = FakeClock()
    async with opened(tmp_path, clock) as tier:
        await wrote(tier, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            await wrote(tier, 2, 3)
        assert tier.counts.failed == 2 and len(tier) == 1
        await wrote(tier, 4)  # it rests: nobody hammers a disk that is full
        assert tier.counts.dropped == 1
        clock.advance(6.0)
        await wrote(tier, 4)
        assert len(tier) == 2 and (await read(tier, 1) == payload(1)).all()


async def test_a_queue_that_is_full_drops_and_lets_go(tmp_path, monkeypatch):
    monkeypatch.setattr(waiting, "MAX_QUEUED", 50)
    tier = NvmeTier(SegmentFiles(tmp_path, SEGMENT, direct=False), 10**9, FakeClock(), 1 << 30)
    released: list[int] = []
    for number in range(120):
        tier.offer(stored(number, 64), payload(1, 64), lambda: released.append(1))
    assert len(released) == 70 == tier.counts.dropped
    tier.offer(stored(1, 64), payload(1, 64), lambda: released.append(1))
    assert len(released) == 71 and tier.counts.dropped == 70  # it is on its way already
    tier.close()
    assert len(released) == 121


async def test_an_end_waits_for_what_is_to_be_written_and_not_for_a_disk_that_stalls(tmp_path, monkeypatch):
    async with opened(tmp_path, FakeClock()) as tier:
        tier.offer(stored(1), payload(1), lambda: None)
        await tier.finish(10.0)
        assert len(tier) == 1
        goes_on = threading.Event()
        monkeypatch.setattr(os, "pwritev", lambda *_: goes_on.wait(30.0))
        tier.offer(stored(2), payload(2), lambda: None)
        await tier.finish(0.01)
        assert len(tier) == 1
        goes_on.set()


async def test_the_newest_of_two_copies_counts_after_a_restart(tmp_path):
    async with opened(tmp_path, FakeClock()) as tier:
        await wrote(tier, 1, 2, 3, 4, 5, 6)
        first = tier._index.get(stored(1).id).place
        tier.forget(stored(1).id)
        await wrote(tier, 1)
        newest = tier._index.get(stored(1).id).place
        assert newest > first
    async with opened(tmp_path, FakeClock()) as tier:
        await until(lambda: len(tier) == 6)
        assert tier._index.get(stored(1).id).place == newest
