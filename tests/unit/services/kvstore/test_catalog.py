"""Lists mean what their filter says and use nothing; upkeep forgets what is damaged or meant, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from fabric.errors import InvalidArgument, NotFound
from fabric.retention import RetentionClass
from protos.deepinfer.v1 import kvstore_admin_pb2 as pb
from services.kvstore import catalog as catalog_module
from services.kvstore.admin_wire import unpack_filter
from services.kvstore.catalog import Catalog, Filter
from services.kvstore.index import Tier
from services.kvstore.policy.budget import Owner
from services.kvstore.records import Record, RecordId, RecordKind
from services.kvstore.tier import DramTier
from services.kvstore.tiers import Tiers
from services.kvstore.upkeep import Upkeep
from tests.unit.services.kvstore import test_tiers
from tests.unit.services.kvstore.test_nvme_tier import until
from tests.unit.services.kvstore.test_tier import SIZE, Clock, chain, name, store

OWNER = Owner("ab" * 16, RetentionClass.AGENT)


class Bench:
    """A tier without a disk, ten records large, and what looks after it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.dram = DramTier(40 * SIZE, self.clock)
        tiers = Tiers(self.dram, None, self.clock)
        self.catalog = Catalog(tiers, self.clock)
        self.found: list[Record] = []
        self.upkeep = Upkeep(tiers, self.catalog, self._damaged)

    def _damaged(self, record: Record) -> None:
        self.found.append(record)
        self.dram.drop(record)

    async def listed(self, wanted: Filter = Filter(), limit: int = 0) -> list[int]:  # noqa: B008 - it is frozen
        """First bytes of the keys, in the order told."""
        return [entry.id.key[0] async for page in self.catalog.pages(wanted, limit) for entry in page]


async def last(steps: AsyncIterator):
    return [step async for step in steps][-1]


async def test_records_are_told_in_the_order_of_their_keys_a_page_at_a_time(monkeypatch) -> None:
    monkeypatch.setattr(catalog_module, "PAGE_RECORDS", 2)
    bench = Bench()
    for index in (5, 3, 9, 1, 7):
        store(bench.dram, index)
    assert [len(page) async for page in bench.catalog.pages(Filter())] == [2, 2, 1]
    assert await bench.listed() == [1, 3, 5, 7, 9]
    assert await bench.listed(limit=3) == [1, 3, 5]
    pages = bench.catalog.pages(Filter())
    assert [entry.id.key[0] for entry in await anext(pages)] == [1, 3]
    bench.dram.drop(bench.dram.by_id(RecordId(RecordKind.BLOCK, name(7).key)))  # leaves between two pages
    assert [entry.id.key[0] async for page in pages for entry in page] == [5, 9]


async def test_what_is_on_disk_alone_is_told_with_its_class_after_a_restart_as_well(tmp_path) -> None:
    async with test_tiers.opened(tmp_path, records=16) as bench:
        assert bench.put(1, retention=RetentionClass.CHAT) and bench.put(2, retention=RetentionClass.AGENT)
        await bench.written()
        for number in (1, 2):
            bench.tiers.dram.drop(bench.tiers.dram.by_id(RecordId(RecordKind.BLOCK, test_tiers.name(number).key)))
        before = await chats(bench.tiers)
    async with test_tiers.opened(tmp_path, records=16) as bench:
        await until(lambda: len(bench.nvme) == 2)
        assert await chats(bench.tiers) == before == [(test_tiers.name(1).key, (Tier.NVME,), RetentionClass.CHAT)]


async def chats(tiers: Tiers) -> list[tuple[bytes, tuple[Tier, ...], RetentionClass]]:
    pages = Catalog(tiers, lambda: 0.0).pages(Filter(retention=RetentionClass.CHAT))
    return [(entry.id.key, entry.tiers, entry.retention) async for page in pages for entry in page]


async def test_filters_hold_all_at_once() -> None:
    bench = Bench()
    chain(bench.dram, 0x10, 0x11)
    store(bench.dram, 0x11, kind=RecordKind.ANCHOR)
    bench.clock.now = 100.0
    store(bench.dram, 0x12)
    bench.dram.retain([name(0x10).key], 1000.0, 1 << 20, OWNER)
    for wanted, keys in (
        (Filter("1"), [0x10, 0x11, 0x11, 0x12]),
        (Filter("11"), [0x11, 0x11]),
        (Filter("111"), [0x11, 0x11]),
        (Filter("2"), []),
        (Filter(kind=RecordKind.ANCHOR), [0x11]),
        (Filter(tier=Tier.NVME), []),
        (Filter(idle_s=100.0), [0x10, 0x11, 0x11]),
        (Filter(owner="abab"), [0x10]),
        (Filter(owner="ac"), []),
        (Filter("11", RecordKind.BLOCK, Tier.DRAM, RetentionClass.DEFAULT, "", 50.0), [0x11]),
        (Filter(retention=RetentionClass.CHAT), []),
    ):
        assert await bench.listed(wanted) == keys, wanted


async def test_an_entry_tells_age_idle_time_and_class_and_looking_is_no_use() -> None:
    bench = Bench()
    record = replace(store(bench.dram, 1), retention=RetentionClass.CHAT)
    bench.dram._records[record.id] = record
    bench.clock.now = 7.0
    bench.dram.use([record])
    bench.clock.now = 10.0
    for _ in range(2):
        entry = bench.catalog.entry(record.id)
        assert (entry.age_s, entry.idle_s, entry.size, entry.tiers) == (10.0, 3.0, SIZE, (Tier.DRAM,))
        assert (entry.retention, entry.owner) == (RetentionClass.CHAT, "")
    assert bench.catalog.entry(RecordId(RecordKind.BLOCK, name(2).key)) is None


async def test_a_prefix_is_whole_or_named_by_what_is_missing() -> None:
    bench = Bench()
    records = chain(bench.dram, 1, 2, 3)
    anchor = store(bench.dram, 3, kind=RecordKind.ANCHOR)
    assert await bench.catalog.prefix(name(3).key) == [*records, anchor]
    assert await bench.catalog.prefix(name(2).key) == records[:2]
    bench.dram.drop(records[1])
    with pytest.raises(NotFound, match=name(2).key.hex()):
        await bench.catalog.prefix(name(3).key)
    with pytest.raises(NotFound):
        await bench.catalog.prefix(name(9).key)


async def test_ends_are_told_with_the_size_of_what_leads_to_them() -> None:
    bench = Bench()
    chain(bench.dram, 1, 2, 3)
    store(bench.dram, 4, parent=name(2).key)
    store(bench.dram, 6, parent=name(5).key)  # what it continues is not here
    store(bench.dram, 3, kind=RecordKind.ANCHOR)
    told = {entry.id.key[0]: prefix async for entry, prefix in bench.catalog.ends(Filter())}
    assert {key: (prefix.blocks, prefix.bytes, prefix.cut) for key, prefix in told.items()} == {
        3: (3, 3 * SIZE, False),
        4: (3, 3 * SIZE, False),
        6: (1, SIZE, True),
    }
    assert len([end async for end in bench.catalog.ends(Filter(), limit=2)]) == 2


async def test_verifying_finds_each_damaged_record_once_and_keeps_the_others() -> None:
    bench = Bench()
    records = chain(bench.dram, 1, 2, 3)
    bench.dram.memory[records[1].offset + 5] ^= 1
    progress = [step async for step in bench.upkeep.verify(Filter())]
    assert [damage.id for step in progress for damage in step.damaged] == [records[1].id] == [r.id for r in bench.found]
    assert (progress[-1].records, progress[-1].bytes, progress[-1].total) == (3, 3 * SIZE, 3)
    assert await bench.listed() == [1, 3]
    assert (await last(bench.upkeep.verify(Filter()))).damaged == ()


async def test_a_record_that_leaves_while_it_is_read_keeps_its_bytes_until_then() -> None:
    bench = Bench()
    (record,) = chain(bench.dram, 1)
    reading = asyncio.ensure_future(last(bench.upkeep.verify(Filter())))
    for _ in range(50):
        await asyncio.sleep(0)
        if bench.dram._pins[record.offset]:
            break
    bench.dram.drop(record)
    assert (await reading).damaged == () and bench.dram.used == 0


async def test_evicting_counts_first_and_forgets_only_what_is_meant() -> None:
    bench = Bench()
    chain(bench.dram, 0x10, 0x11, 0x20)
    told = await last(bench.upkeep.evict(Filter("1"), execute=False))
    assert (told.records, told.bytes) == (2, 2 * SIZE) and len(bench.dram) == 3
    assert await last(bench.upkeep.evict(Filter("1"), execute=True)) == told
    assert await bench.listed() == [0x20] and bench.dram.used == SIZE
    assert (await last(bench.upkeep.evict(Filter("1"), execute=True))).records == 0
    await last(bench.upkeep.evict(Filter("2", tier=Tier.NVME), execute=True))
    assert await bench.listed() == [0x20]  # of the disk alone, and there is none


def test_filters_from_afar_are_checked_by_name() -> None:
    assert unpack_filter(pb.RecordFilter()).empty
    told = unpack_filter(pb.RecordFilter(key_prefix="0a", tier=pb.RECORD_TIER_NVME, idle_ms=1500))
    assert told == Filter("0a", tier=Tier.NVME, idle_s=1.5) and not told.empty
    for wrong in (
        pb.RecordFilter(key_prefix="0G"),
        pb.RecordFilter(owner="a" * 65),
        pb.RecordFilter(kind=9),
        pb.RecordFilter(tier=9),
        pb.RecordFilter(retention=9),
    ):
        with pytest.raises(InvalidArgument) as refused:
            unpack_filter(wrong)
        assert refused.value.field.startswith("filter")
