"""A prefetch brings up what is on disk alone, within its bounds, and does nothing where there is nothing to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from fabric.kvlink.verify import digest
from fabric.lifecycle import background
from fabric.records import Extent
from services.kvstore import prefetch as prefetching
from services.kvstore.nvme.files import SegmentFiles
from services.kvstore.nvme.tier import NvmeTier
from services.kvstore.prefetch import Prefetcher, Rising
from services.kvstore.records import ROOT, BlockName, Identity, Record, RecordId, RecordKind
from services.kvstore.tier import DramTier
from services.kvstore.tiers import Tiers
from tests.support.clock import FakeClock

SIZE = 4096
IDENTITY = Identity("rev", "layout")
NAMES = [BlockName(number.to_bytes(32), number.to_bytes(4)) for number in range(1, 101)]


class Bench:
    """Both tiers, a prefetcher that may bring up 60 blocks at a time, and what it was asked for."""

    def __init__(self, tiers: Tiers) -> None:
        self.tiers, self.prefetcher = tiers, Prefetcher(tiers, 60 * SIZE)

    async def stored_below(self, blocks: int, anchored: int) -> None:
        """The first `blocks` names are on disk alone, and an anchor at the end of the first `anchored` ones."""
        for index, name in enumerate(NAMES[:blocks]):
            self._put(RecordKind.BLOCK, name, ROOT if not index else NAMES[index - 1].key)
        self._put(RecordKind.ANCHOR, NAMES[anchored - 1], ROOT)
        assert self.tiers.nvme is not None
        async with asyncio.timeout(10.0):
            await self.tiers.nvme.drained()
        for record in [self.tiers.dram.by_id(record) for record in list(self.tiers.dram.ids)]:
            assert record is not None
            self.tiers.dram.drop(record)

    async def risen(self) -> None:
        async with asyncio.timeout(10.0), background(self.prefetcher.run(), "prefetches"):
            await self.prefetcher.settled()

    def in_memory(self, kind: RecordKind = RecordKind.BLOCK) -> int:
        return sum(record.kind is kind for record in self.tiers.dram.ids)

    def _put(self, kind: RecordKind, name: BlockName, parent: bytes) -> None:
        dram, data = self.tiers.dram, np.full(SIZE, name.key[-1], dtype=np.uint8)
        place = dram.take(SIZE)
        assert place is not None
        dram.memory[place : place + SIZE] = data
        extent = Extent("latent", 0, 1, 0, SIZE, digest(data))
        record = Record(RecordId(kind, name.key), IDENTITY, name.tokens, parent, place, SIZE, (extent,))
        assert dram.admit(record)
        self.tiers.keep(record)


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Bench]:
    clock = FakeClock(10_000.0)
    nvme = NvmeTier(SegmentFiles(folder, 256 * SIZE, direct=False), 1 << 30, clock, 1 << 30)
    try:
        async with background(nvme.run(), "nvme"):
            yield Bench(Tiers(DramTier(128 * SIZE, clock), nvme, clock))
    finally:
        nvme.close()


async def test_what_is_of_use_comes_up_and_what_follows_the_last_anchor_stays(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        await bench.stored_below(50, anchored=40)
        assert bench.prefetcher.ask(NAMES, IDENTITY, anchor=True) == Rising(40, 40)
        await bench.risen()
        assert (bench.in_memory(), bench.in_memory(RecordKind.ANCHOR)) == (40, 1)
        assert bench.prefetcher.counts.blocks == 40
        assert bench.prefetcher.ask(NAMES, IDENTITY, anchor=True) == Rising(40, 0)


async def test_an_anchor_that_left_before_its_blocks_comes_up_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        await bench.stored_below(10, anchored=10)
        bench.prefetcher.ask(NAMES, IDENTITY, anchor=False)
        await bench.risen()
        assert (bench.in_memory(), bench.in_memory(RecordKind.ANCHOR)) == (10, 0)
        bench.prefetcher.ask(NAMES, IDENTITY, anchor=True)
        await bench.risen()
        assert bench.in_memory(RecordKind.ANCHOR) == 1


async def test_a_long_prefix_brings_up_no_more_than_its_bound(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        await bench.stored_below(100, anchored=100)
        assert bench.prefetcher.ask(NAMES, IDENTITY, anchor=True) == Rising(100, 60)
        await bench.risen()
        assert bench.in_memory() == 60


async def test_hints_beyond_the_bound_are_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "MAX_WAITING", 2)
    async with opened(tmp_path) as bench:
        await bench.stored_below(10, anchored=10)
        asked = [bench.prefetcher.ask(NAMES, IDENTITY, anchor=True) for _ in range(3)]
        assert [each.rising for each in asked] == [10, 10, 0]
        assert (bench.prefetcher.counts.taken, bench.prefetcher.counts.dropped) == (2, 1)
        await bench.risen()
        assert bench.in_memory() == 10


async def test_of_another_model_nothing_comes_up(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        await bench.stored_below(10, anchored=10)
        bench.prefetcher.ask(NAMES, Identity("other", "layout"), anchor=True)
        await bench.risen()
        assert bench.in_memory() == 0
