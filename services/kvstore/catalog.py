"""Catalog: what the tiers hold, told as an operator asks for it. Knows names, sizes and ages; reads no KV bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from fabric.errors import NotFound
from fabric.retention import RetentionClass
from services.kvstore.index import Tier
from services.kvstore.nvme.format import Stored
from services.kvstore.records import ROOT, Record, RecordId, RecordKind
from services.kvstore.tiers import Tiers

PAGE_RECORDS = 256
MAX_PREFIX_BLOCKS = 16_384


@dataclass(frozen=True, slots=True)
class Filter:
    """Which records are meant; all that is set must hold. `key_prefix`, `owner`: leading hexadecimal digits."""

    key_prefix: str = ""
    kind: RecordKind | None = None
    tier: Tier | None = None
    retention: RetentionClass | None = None
    owner: str = ""
    idle_s: float = 0.0

    @property
    def empty(self) -> bool:
        """Whether it means everything."""
        return self == Filter()

    def names(self, record: RecordId) -> bool:
        """Whether the name alone does not rule it out."""
        return (self.kind is None or record.kind is self.kind) and record.key.hex().startswith(self.key_prefix)

    def matches(self, entry: Entry) -> bool:
        """Whether the record is meant."""
        return (
            self.names(entry.id)
            and (self.tier is None or self.tier in entry.tiers)
            and (self.retention is None or entry.retention is self.retention)
            and (not self.owner or entry.owner.startswith(self.owner))
            and entry.idle_s >= self.idle_s
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """One record. `age_s` is None where only the disk could tell. `owner`: hexadecimal digits, of its promise, if it
    has one: promises are of DRAM.
    """

    id: RecordId
    size: int
    tiers: tuple[Tier, ...]
    age_s: float | None
    idle_s: float
    retention: RetentionClass
    owner: str


@dataclass(frozen=True, slots=True)
class Description:
    """What a record says of itself in either tier."""

    record: Record | Stored
    stored_at: float | None  # unix seconds, where it lies on disk alone


@dataclass(frozen=True, slots=True)
class Prefix:
    """How much of a prefix is here, back from its end; `cut`: not from its start."""

    blocks: int
    bytes: int
    cut: bool


class Catalog:
    """Looks at both tiers, uses nothing. `now` tells unix seconds."""

    def __init__(self, tiers: Tiers, now: Callable[[], float]) -> None:
        self._tiers, self._now = tiers, now

    async def ids(self, wanted: Filter) -> list[RecordId]:
        """Names that a filter may mean, in the order of their keys; what they name may leave at any time."""
        nvme = self._tiers.nvme
        held = {*self._tiers.dram.ids, *(nvme.ids if nvme is not None else ())}
        return await asyncio.to_thread(_sorted, held, wanted)

    def entry(self, record: RecordId) -> Entry | None:
        """The record as it is now, None where it left."""
        here, standing = self._tiers.dram.by_id(record), self._tiers.dram.standing(record)
        below = self._tiers.nvme.known(record) if self._tiers.nvme is not None else None
        if here is not None and standing is not None:
            tiers = (Tier.DRAM, Tier.NVME) if below is not None else (Tier.DRAM,)
            owner = standing.owner.tenant if standing.owner is not None else ""
            return Entry(record, here.size, tiers, standing.age_s, standing.idle_s, here.retention, owner)
        if below is not None:
            idle_s = max(0.0, self._now() - below.used_at)
            return Entry(record, below.size, (Tier.NVME,), None, idle_s, below.retention, "")
        return None

    async def pages(self, wanted: Filter, limit: int = 0) -> AsyncIterator[list[Entry]]:
        """Records that a filter means, at most `limit` of them (0: all), some at a time; others run in between."""
        left = limit or len(self._tiers.dram) + (len(self._tiers.nvme) if self._tiers.nvme is not None else 0)
        names = await self.ids(wanted)
        for first in range(0, len(names), PAGE_RECORDS):
            found = [self.entry(name) for name in names[first : first + PAGE_RECORDS]]
            page = [entry for entry in found if entry is not None and wanted.matches(entry)][:left]
            left -= len(page)
            if page:
                yield page
            if not left:
                return
            await asyncio.sleep(0)

    async def ends(self, wanted: Filter, limit: int = 0) -> AsyncIterator[tuple[Entry, Prefix]]:
        """Blocks that no other one here continues, of those that a filter means; all parents are read before."""
        held: dict[bytes, tuple[bytes, int]] = {}  # parent and bytes of each block
        for number, name in enumerate(await self.ids(Filter(kind=RecordKind.BLOCK))):
            found = await self.describe(name)
            if found is not None:
                held[name.key] = found.record.parent, found.record.size
            if number % PAGE_RECORDS == 0:
                await asyncio.sleep(0)
        continued, told = {parent for parent, _ in held.values()}, 0
        for key in held:
            entry = None if key in continued else self.entry(RecordId(RecordKind.BLOCK, key))
            if entry is not None and wanted.matches(entry):
                yield entry, _prefix(key, held)
                told += 1
                if told == limit:
                    return

    async def describe(self, record: RecordId) -> Description | None:
        """What the record says of itself, from the disk where it is there alone; None where it left or is damaged."""
        here = self._tiers.dram.by_id(record)
        if here is not None:
            return Description(here, None)
        stored = await self._tiers.nvme.head(record) if self._tiers.nvme is not None else None
        return Description(stored, stored.stored_at) if stored is not None else None

    async def prefix(self, key: bytes) -> list[Record | Stored]:
        """All blocks of a prefix from its start up to the block called `key`, and that block's anchor if it is here.

        Raises:
            NotFound: one of the blocks is not here, or there are more than any prompt has.
        """
        blocks: list[Record | Stored] = []
        while key != ROOT:
            found = await self.describe(RecordId(RecordKind.BLOCK, key))
            if found is None or len(blocks) == MAX_PREFIX_BLOCKS:
                raise NotFound(
                    f"block {key.hex()} is not here, {len(blocks)} blocks before the end of the prefix",
                    field="key",
                    fix="name the last block of a prefix that this instance holds from its start",
                )
            blocks.append(found.record)
            key = found.record.parent
        anchor = await self.describe(RecordId(RecordKind.ANCHOR, blocks[0].id.key)) if blocks else None
        return [*reversed(blocks), *([anchor.record] if anchor is not None else [])]


def _prefix(key: bytes, held: dict[bytes, tuple[bytes, int]]) -> Prefix:
    blocks = size = 0
    while key in held:
        key, nbytes = held[key]
        blocks, size = blocks + 1, size + nbytes
    return Prefix(blocks, size, key != ROOT)


def _sorted(held: set[RecordId], wanted: Filter) -> list[RecordId]:
    return sorted(filter(wanted.names, held), key=lambda record: (record.key, record.kind))
