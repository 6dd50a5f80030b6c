"""DRAM over a disk: whatever the disk does, the store goes on storing and raising."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fabric.kvlink.verify import digest
from fabric.lifecycle import background
from fabric.records import Extent
from fabric.retention import RetentionClass
from services.kvstore.nvme.files import SegmentFiles
from services.kvstore.nvme.tier import NvmeTier
from services.kvstore.policy.retention import WarmWindow
from services.kvstore.records import ROOT, BlockName, Identity, Record, RecordId, RecordKind
from services.kvstore.tier import DramTier
from services.kvstore.tiers import Tiers
from tests.support.clock import FakeClock

SIZE = 4096
IDENTITY = Identity("rev", "layout")


def name(number: int) -> BlockName:
    return BlockName(number.to_bytes(32), number.to_bytes(4))


def payload(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8)


@dataclass
class Bench:
    """Both tiers on one clock."""

    tiers: Tiers
    clock: FakeClock

    @property
    def nvme(self) -> NvmeTier:
        assert self.tiers.nvme is not None
        return self.tiers.nvme

    def held(self) -> set[int]:
        """Blocks in DRAM."""
        return {int.from_bytes(record.key) for record in self.tiers.dram.ids}

    def put(self, number: int, parent: int | None = None, retention: RetentionClass = RetentionClass.DEFAULT) -> bool:
        """Stores a block as a writer's commit does; False where DRAM has no room that can be made."""
        dram, data = self.tiers.dram, payload(number)
        place = dram.take(SIZE)
        if place is None:
            return False
        dram.memory[place : place + SIZE] = data
        extent = Extent("latent", 0, 1, 0, SIZE, digest(data))
        above = ROOT if parent is None else name(parent).key
        block = RecordId(RecordKind.BLOCK, name(number).key)
        one = Record(block, IDENTITY, name(number).tokens, above, place, SIZE, (extent,), retention)
        if dram.admit(one):
            self.tiers.keep(one)
        return True

    async def get(self, *numbers: int) -> int:
        """Leading blocks of a prefix that come back, each as it was put."""
        names = [name(number) for number in numbers]
        await self.tiers.raise_(names, IDENTITY, anchor=False)
        records = self.tiers.collect(names, IDENTITY, anchor=False)
        self.tiers.use(records)
        for number, record in zip(numbers, records, strict=False):
            assert (self.tiers.dram.memory[record.offset : record.offset + SIZE] == payload(number)).all()
        return len(records)

    async def written(self) -> None:
        async with asyncio.timeout(10.0):
            await self.nvme.drained()


@asynccontextmanager
async def opened(folder: Path, records: int, queue_records: int = 1000, segments: int = 1000) -> AsyncIterator[Bench]:
    """DRAM of `records` blocks over a disk of segments of 8 blocks."""
    clock, segment = FakeClock(10_000.0), 16 * SIZE
    nvme = NvmeTier(SegmentFiles(folder, segment, direct=False), segments * segment, clock, queue_records * SIZE)
    try:
        async with background(nvme.run(), "nvme"):
            yield Bench(Tiers(DramTier(records * SIZE, clock, WarmWindow()), nvme, clock), clock)
    finally:
        nvme.close()


@contextmanager
def stalled(monkeypatch, call: str = "pwritev") -> Iterator[threading.Event]:
    """Writes, or reads, wait from now on: the event says that one does. They go on at the end of the block."""
    goes_on, waits, real = threading.Event(), threading.Event(), getattr(os, call)

    def slow(*arguments: object) -> int:
        waits.set()
        assert goes_on.wait(30.0)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, slow)
        try:
            yield waits
        finally:
            goes_on.set()


async def test_a_disk_that_stalls_holds_its_share_of_dram_and_no_more(tmp_path, monkeypatch):
    async with opened(tmp_path, records=16, queue_records=4) as bench:
        for number in range(4):
            assert bench.put(number)
            await bench.written()
        with stalled(monkeypatch) as waits:
            assert bench.put(100)
            assert await asyncio.to_thread(waits.wait, 10.0)
            for number in range(101, 140):  # more than DRAM holds: each finds room
                assert bench.put(number), number
                assert bench.nvme.waiting_bytes <= 4 * SIZE
            assert bench.nvme.counts.dropped == 36 and bench.nvme.counts.written == 4
            assert await bench.get(0, 1, 2, 3) == 4  # what is on disk comes up meanwhile
            assert await bench.get(139) == 1
        await bench.written()
        assert bench.nvme.waiting_bytes == 0 and bench.nvme.counts.written == 8
        assert all(bench.nvme.size_of(RecordId(RecordKind.BLOCK, name(n).key)) for n in (100, 101, 102, 103))
        assert bench.put(200) and await bench.get(200) == 1
        await bench.written()
        assert bench.nvme.counts.written == 9


async def test_a_record_larger_than_the_share_is_written_while_nothing_else_waits(tmp_path):
    async with opened(tmp_path, records=4, queue_records=0) as bench:
        assert bench.put(1) and bench.put(2)
        await bench.written()
        assert bench.nvme.counts.written == 1 and bench.nvme.counts.dropped == 1


async def test_what_was_idle_for_the_warm_window_is_on_disk_alone_and_comes_back(tmp_path):
    async with opened(tmp_path, records=16) as bench:
        for number in range(3):
            assert bench.put(number, parent=number - 1 if number else None)
        await bench.written()
        bench.clock.advance(1800.0)
        assert await bench.get(0) == 1
        bench.clock.advance(1801.0)
        bench.tiers.dram.drop_idle()
        assert bench.held() == {0} and len(bench.nvme) == 3  # a hit starts the window anew
        bench.clock.advance(1800.0)
        bench.tiers.dram.drop_idle()
        assert bench.held() == set() and await bench.get(0, 1, 2) == 3


async def test_what_is_not_on_disk_stays_warm_for_its_class_and_is_offered_again(tmp_path, monkeypatch):
    async with opened(tmp_path, records=16) as bench:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(5, "broken")))
            assert bench.put(1)
            await bench.written()
            bench.clock.advance(3601.0)
            bench.tiers.dram.drop_idle()
            await bench.written()
            assert bench.held() == {1} and bench.nvme.counts.failed == 2
        bench.clock.advance(61.0)
        bench.tiers.dram.drop_idle()  # offered again, and seen to be there a minute later
        await bench.written()
        bench.clock.advance(61.0)
        bench.tiers.dram.drop_idle()
        assert bench.held() == set() and await bench.get(1) == 1


async def test_without_a_disk_records_stay_for_their_class(tmp_path):
    clock = FakeClock(10_000.0)
    bench = Bench(Tiers(DramTier(16 * SIZE, clock), None, clock), clock)
    assert bench.put(1) and bench.put(2, retention=RetentionClass.CHAT)
    clock.advance(71 * 3600.0)
    bench.tiers.dram.drop_idle()
    assert bench.held() == {1, 2}
    clock.advance(3601.0)
    bench.tiers.dram.drop_idle()
    assert bench.held() == {2}


async def test_what_a_worker_used_in_its_own_memory_stays_young_and_one_request_is_one_use(tmp_path):
    async with opened(tmp_path, records=16) as bench:
        ids = [RecordId(RecordKind.BLOCK, name(number).key) for number in range(3)]
        for number in range(3):
            assert bench.put(number, parent=number - 1 if number else None)
        await bench.written()
        bench.clock.advance(3000.0)
        assert await bench.get(0, 1) == 2
        bench.tiers.refresh([*ids, RecordId(RecordKind.BLOCK, name(9).key)])  # the offer of the same request
        standing = [bench.tiers.dram.standing(record) for record in ids]
        assert [one.uses for one in standing if one is not None] == [1, 1, 1]
        known = [bench.nvme.known(record) for record in ids]
        assert [one.used_at for one in known if one is not None] == [bench.clock.now] * 3
        bench.clock.advance(3000.0)
        bench.tiers.dram.drop_idle()
        assert bench.held() == {0, 1, 2}


async def test_a_hit_above_is_a_use_below_and_writes_what_the_disk_had_no_time_for(tmp_path, monkeypatch):
    async with opened(tmp_path, records=16, queue_records=1) as bench:
        with stalled(monkeypatch) as waits:
            assert bench.put(0) and await asyncio.to_thread(waits.wait, 10.0)
            assert bench.put(1)  # finds the queue full
        await bench.written()
        assert len(bench.nvme) == 1
        bench.clock.advance(50.0)
        assert await bench.get(0) == 1 and await bench.get(1) == 1
        await bench.written()
        assert len(bench.nvme) == 2
        known = bench.nvme.known(RecordId(RecordKind.BLOCK, name(0).key))
        assert known is not None and known.used_at == bench.clock.now


async def test_equal_keys_on_disk_that_stand_for_other_tokens_or_another_history_come_up_as_nothing(tmp_path):
    async with opened(tmp_path, records=4) as bench:
        assert bench.put(1) and bench.put(2, parent=1)
        await bench.written()
        for number in (2, 1):
            bench.tiers.dram.drop(bench.tiers.dram.by_id(RecordId(RecordKind.BLOCK, name(number).key)))
        for forged in (name(1)._replace(tokens=b"else"), name(1)._replace(parent=name(9).key)):
            await bench.tiers.raise_([forged, name(2)], IDENTITY, anchor=False)
            assert bench.tiers.collect([forged, name(2)], IDENTITY, anchor=False) == []
        assert bench.held() <= {2}, "room that was taken for it is given back"
        assert await bench.get(1, 2) == 2
