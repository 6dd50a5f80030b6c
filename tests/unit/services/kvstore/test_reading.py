"""A read over a real link by a reader of the same host, from the store's records to the reader's memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
from pydantic import SecretStr

from fabric.errors import DataLoss
from fabric.kvlink import open_link
from fabric.kvlink.extents import Row
from fabric.kvlink.incoming import Intake
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.outgoing import SendLimits
from fabric.kvlink.slabs import Writer
from fabric.kvlink.verify import digest
from fabric.lifecycle import background
from fabric.records import Extent, Landing
from services.kvstore.records import ROOT, BlockName, Identity, Record, RecordId, RecordKind
from services.kvstore.service import build
from services.kvstore.settings import KvStoreSettings
from services.kvstore.store import Store

IDENTITY = Identity("revision", "layout")
SIZE, BLOCKS = 1 << 20, 12
WINDOW = 4 * SIZE


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    settings = KvStoreSettings(
        transport="ucx://", index=SecretStr("memory://"), memory_mb=4 * BLOCKS
    )  # one read, one part
    async with build(settings) as service:
        yield service.servicers[0][1].store


def filled(store: Store, content: np.ndarray) -> list[BlockName]:
    """Puts one block for each row of `content` (uint8 [n, SIZE])."""
    names: list[BlockName] = []
    for number, row in enumerate(content):
        name = BlockName(bytes([number + 1]) * 32, b"", names[-1].key if names else ROOT)
        offset = store.tier.take(SIZE)
        assert offset is not None
        store.tier.memory[offset : offset + SIZE] = row
        extent = Extent("latent", 0, 1, 0, SIZE, digest(row))
        block = RecordId(RecordKind.BLOCK, name.key)
        assert store.tier.admit(Record(block, IDENTITY, b"", name.parent or ROOT, offset, SIZE, (extent,)))
        names.append(name)
    return names


class Reader:
    """A reader of the same host; it takes what comes while it follows."""

    def __init__(self, target: np.ndarray) -> None:
        self.link, self.target = open_link("ucx://", "reader", 1), target
        self.intake = Intake(self.link, LandingPool(self.link, 4 * WINDOW))

    def open(self, name: str, first: int = 0) -> Landing:
        return self.intake.open(name, WINDOW, lambda group, block, size: self.target[block - first])

    async def follow(self) -> None:
        async for notice in self.link.notices():
            self.intake.noticed(notice)

    async def read(self, store: Store, names: list[BlockName], name: str) -> None:
        """A whole read, after which it is known that this reader reads the store's memory where it is."""
        landing = self.open(name)
        async with background(self.follow(), "notices"):
            await store.get(names, 0, False, IDENTITY, landing, lambda row: None)
            await self.intake.ready(name, 10.0)
            await self.intake.close(name, Writer.FINISHED)
            await store.leftovers.over(name)


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    ends = Reader(np.zeros((BLOCKS, SIZE), np.uint8))
    yield ends
    await ends.intake.aclose()
    await ends.link.close()


def seeded() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (BLOCKS, SIZE), dtype=np.uint8)


def is_free(store: Store) -> bool:
    """Whether no read keeps anything in place."""
    return not store.tier._pins and not store.tiers.allowance.taken


async def test_what_is_told_is_what_was_verified_where_it_is_used_and_the_policy_hears_of_it(
    store: Store, reader: Reader
) -> None:
    content, told, used = seeded(), list[Row](), list[RecordId]()
    names = filled(store, content)
    store.tier._order.touch = lambda keys, now: used.extend(keys)  # type: ignore[method-assign]
    landing = reader.open("read", first=5)
    async with asyncio.timeout(30.0), background(reader.follow(), "notices"):
        served = await store.get(names, 5, False, IDENTITY, landing, told.append)
        verified = await reader.intake.ready("read", 10.0)
        await reader.intake.close("read", Writer.FINISHED)
    assert (served.blocks, served.anchor) == (BLOCKS, False)
    assert np.array_equal(reader.target, content)
    assert [block for _, block, *_ in told] == list(range(5, 5 + BLOCKS))
    assert verified == {(group, block): (valid, size, seal) for group, block, valid, _, size, seal in told}
    assert used == [RecordId(RecordKind.BLOCK, name.key) for name in names], "each once"


async def test_a_known_reader_is_answered_before_it_read_and_its_bytes_stay_until_it_did(
    store: Store, reader: Reader
) -> None:
    content = seeded()
    names = filled(store, content)
    async with asyncio.timeout(30.0):
        await reader.read(store, names, "first")
        assert is_free(store)
        reader.target[:] = 0
        landing = reader.open("second")
        served = await store.get(names, 0, False, IDENTITY, landing, lambda row: None)
        assert served.blocks == BLOCKS and not reader.target.any() and store.leftovers.pending == 1
        pinned = {record.offset for record in store.tier._records.values()}
        for record in list(store.tier._records.values()):
            store.tier.drop(record)
        assert set(store.tier._pins) == pinned and store.tier.used == BLOCKS * SIZE, "dropped, and in place"
        async with background(reader.follow(), "notices"):
            await reader.intake.ready("second", 10.0)
            assert await store.leftovers.over("second")
    assert np.array_equal(reader.target, content) and is_free(store) and not store.tier.used


async def test_what_a_known_reader_leaves_unread_stays_in_place_no_longer_than_a_write_may_take(
    store: Store, reader: Reader
) -> None:
    names = filled(store, seeded())
    async with asyncio.timeout(30.0):
        await reader.read(store, names, "first")
        store._sender._use = replace(store._sender._use, limits=SendLimits(timeout_s=0.05))
        landing = reader.open("second")
        await store.get(names, 0, False, IDENTITY, landing, lambda row: None)
        assert not is_free(store)
        await store.leftovers.over("second")
    assert is_free(store)


async def test_damage_that_a_known_reader_finds_after_its_answer_is_counted_and_forgotten(
    store: Store, reader: Reader
) -> None:
    names = filled(store, seeded())
    async with asyncio.timeout(30.0):
        await reader.read(store, names, "first")
        spoilt = store.tier.by_id(RecordId(RecordKind.BLOCK, names[7].key))
        assert spoilt is not None
        store.tier.memory[spoilt.offset] ^= 1
        landing = reader.open("second")
        await store.get(names, 0, False, IDENTITY, landing, lambda row: None)
        async with background(reader.follow(), "notices"):
            with pytest.raises(DataLoss):
                await reader.intake.ready("second", 10.0)
            assert not await store.leftovers.over("second")
    assert [store.tier.by_id(RecordId(RecordKind.BLOCK, name.key)) is None for name in names].index(True) == 7
    assert len(store.tier) == BLOCKS - 1 and is_free(store)


async def test_a_read_that_is_cut_ends_at_once_and_its_bytes_come_free(store: Store, reader: Reader) -> None:
    names, landing = filled(store, seeded()), reader.open("read")
    async with asyncio.timeout(30.0):
        reading = asyncio.create_task(store.get(names, 0, False, IDENTITY, landing, lambda row: None))
        while not store.tier._pins:  # noqa: ASYNC110 - a reader that does not know yet that it is read to
            await asyncio.sleep(0)
        reading.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert reading.done()
        await store.leftovers.over("read")
    assert is_free(store)


async def test_a_read_that_is_cut_in_a_write_ends_at_once_and_its_bytes_stay_until_the_write_ended(
    store: Store, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def push(*arguments: object, **options: object) -> None:
        begun.set()
        await go_on.wait()

    monkeypatch.setattr(store._link, "lends", lambda address, region: False)
    monkeypatch.setattr(store._link, "push_at_once", lambda address, writes, notify: False)
    monkeypatch.setattr(store._link, "push", push)
    names, landing = filled(store, seeded()), reader.open("read")
    async with asyncio.timeout(30.0):
        reading = asyncio.create_task(store.get(names, 0, False, IDENTITY, landing, lambda row: None))
        await begun.wait()
        reading.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert reading.done() and not is_free(store) and store.leftovers.pending == 1
        go_on.set()
        assert await store.leftovers.over("read")
    assert is_free(store)
