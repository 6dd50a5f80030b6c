"""Upkeep: reads records again, and makes the store forget some. Knows tiers and pins; decides nothing by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from services.kvstore.catalog import Catalog, Entry, Filter
from services.kvstore.index import Tier
from services.kvstore.records import Record, RecordId
from services.kvstore.tiers import Tiers
from services.worker.together import settled

_STEP_BYTES = 32 << 20  # between two words on progress


@dataclass(frozen=True, slots=True)
class Damage:
    id: RecordId
    tier: Tier


@dataclass(frozen=True, slots=True)
class Progress:
    """So far: `records` and `bytes` done, of `total` records at most; `damaged` since the last word."""

    records: int
    bytes: int
    total: int
    damaged: tuple[Damage, ...] = ()


class Upkeep:
    """One record at a time, so that readers and writers go on meanwhile. `damaged` forgets one in DRAM, and counts."""

    def __init__(self, tiers: Tiers, catalog: Catalog, damaged: Callable[[Record], None]) -> None:
        self._tiers, self._catalog, self._damaged = tiers, catalog, damaged

    async def verify(self, wanted: Filter) -> AsyncIterator[Progress]:
        """Reads what the filter means in every tier that has it. What is damaged is counted and forgotten there."""
        names = await self._catalog.ids(wanted)
        records = size = told = 0
        damaged: list[Damage] = []
        for name in names:
            entry = self._catalog.entry(name)
            if entry is None or not wanted.matches(entry):
                continue
            for tier in entry.tiers if wanted.tier is None else (wanted.tier,):
                damaged += [] if await self._is_sound(entry, tier) else [Damage(name, tier)]
                size += entry.size
            records += 1
            if size - told >= _STEP_BYTES or damaged:
                yield Progress(records, size, len(names), tuple(damaged))
                told, damaged = size, []
        yield Progress(records, size, len(names), tuple(damaged))

    async def evict(self, wanted: Filter, execute: bool) -> AsyncIterator[Progress]:
        """Forgets what the filter means, in the tier it names or in both; or only counts it.

        Raises:
            OSError: the disk could not be written; what was forgotten may be found again by a restart.
        """
        records = size = 0
        async for page in self._catalog.pages(wanted):
            if execute:
                await self._forget(page, wanted.tier)
            records, size = records + len(page), size + sum(entry.size for entry in page)
            yield Progress(records, size, 0)
        if not records:
            yield Progress(0, 0, 0)

    async def _is_sound(self, entry: Entry, tier: Tier) -> bool:
        if tier is Tier.NVME:
            return self._tiers.nvme is None or await self._tiers.nvme.verify(entry.id)
        record = self._tiers.dram.by_id(entry.id)
        if record is None:
            return True
        with self._tiers.dram.pinned([record]):
            if await settled(asyncio.to_thread(self._tiers.dram.is_intact, record)):
                return True
        self._damaged(record)
        return False

    async def _forget(self, page: list[Entry], tier: Tier | None) -> None:
        if tier is not Tier.NVME:
            for record in (self._tiers.dram.by_id(entry.id) for entry in page):
                if record is not None:
                    self._tiers.dram.drop(record)
        if tier is not Tier.DRAM and self._tiers.nvme is not None:
            await self._tiers.nvme.erase([entry.id for entry in page])
