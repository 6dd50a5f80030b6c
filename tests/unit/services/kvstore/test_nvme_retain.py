"""A promise holds on disk as it does in DRAM: others leave first, within budgets, and nothing is pinned."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fabric.lifecycle import background
from fabric.retention import RetentionClass
from services.kvstore.nvme.files import SegmentFiles
from services.kvstore.nvme.tier import NvmeTier
from services.kvstore.policy.budget import Budgets, Owner
from services.kvstore.policy.retention import WarmWindow
from services.kvstore.records import RecordId, RecordKind
from services.kvstore.tier import DramTier
from services.kvstore.tiers import Tiers
from tests.support.clock import FakeClock
from tests.unit.services.kvstore.test_tiers import SIZE, Bench, name

ANN = Owner("ann", RetentionClass.AGENT)
SEGMENT = 16 * SIZE  # eight records


@asynccontextmanager
async def opened(folder: Path, records: int, segments: int, budget: int) -> AsyncIterator[Bench]:
    """DRAM of `records` blocks over a disk of `segments` segments; either may have `budget` blocks promised."""
    clock, budgets = FakeClock(10_000.0), [Budgets(budget * SIZE, budget * SIZE) for _ in range(2)]
    files = SegmentFiles(folder, SEGMENT, direct=False)
    nvme = NvmeTier(files, segments * SEGMENT, clock, 1000 * SIZE, budgets=budgets[0])
    try:
        async with background(nvme.run(), "nvme"):
            yield Bench(Tiers(DramTier(records * SIZE, clock, WarmWindow(), budgets[1]), nvme, clock), clock)
    finally:
        nvme.close()


async def put(bench: Bench, *numbers: int) -> None:
    """Blocks that continue nothing, a second apart, each on disk at the end."""
    for number in numbers:
        bench.clock.advance(1.0)
        assert bench.put(number)
        await bench.written()


def on_disk(bench: Bench) -> set[int]:
    return {int.from_bytes(record.key) for record in bench.nvme.ids}


async def test_what_was_promised_before_it_was_written_outlives_others_on_disk(tmp_path: Path) -> None:
    async with opened(tmp_path, records=8, segments=4, budget=4) as bench:
        for number in (1, 2):
            assert bench.put(number)
        assert bench.tiers.retain([name(1).key], 1e6, 100 * SIZE, ANN) == (1, SIZE)
        await put(bench, *range(100, 200))
        assert 1 in on_disk(bench) and 2 not in on_disk(bench)
        assert await bench.get(1) == 1


async def test_what_is_on_disk_alone_can_be_promised_within_its_budget(tmp_path: Path) -> None:
    async with opened(tmp_path, records=4, segments=4, budget=2) as bench:
        await put(bench, *range(1, 9))
        for record in [bench.tiers.dram.by_id(record) for record in bench.tiers.dram.ids]:
            bench.tiers.dram.drop(record)
        keys = [name(number).key for number in (1, 2, 3)]
        assert bench.tiers.retain(keys, 1e6, 100 * SIZE, ANN) == (2, 2 * SIZE)
        await put(bench, *range(100, 200))
        assert {1, 2} <= on_disk(bench) and 3 not in on_disk(bench)


async def test_a_record_in_both_tiers_counts_once_and_a_call_keeps_no_more_than_it_may(tmp_path: Path) -> None:
    async with opened(tmp_path, records=8, segments=4, budget=8) as bench:
        await put(bench, 1, 2)
        keys = [name(number).key for number in (1, 2)]
        assert bench.tiers.retain(keys, 1e6, SIZE, ANN) == (1, SIZE)
        assert bench.nvme.retain(keys, 1e6, SIZE, ANN) == {RecordId(RecordKind.BLOCK, keys[0]): SIZE}


@pytest.mark.parametrize("promised", [10, 30])
async def test_promises_never_keep_the_disk_from_taking_what_is_new(tmp_path: Path, promised: int) -> None:
    async with opened(tmp_path, records=8, segments=4, budget=1000) as bench:
        for number in range(promised):
            await put(bench, number)
            bench.tiers.retain([name(number).key], 1e6, 100 * SIZE, ANN)
        await put(bench, *range(100, 140))
        assert 139 in on_disk(bench) and bench.nvme.used <= bench.nvme.capacity
