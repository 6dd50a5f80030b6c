"""A read over a real link by a reader of the same host, from the store's records to the reader's memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from pydantic import SecretStr

from fabric.kvlink import Link, open_link
from fabric.kvlink.extents import Row
from fabric.kvlink.incoming import Intake
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.slabs import Writer
from fabric.kvlink.verify import digest
from fabric.lifecycle import background
from fabric.records import Extent
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


async def test_what_is_told_is_what_was_verified_where_it_is_used_and_the_policy_hears_of_it(store: Store) -> None:
    content = np.random.default_rng(3).integers(0, 256, (BLOCKS, SIZE), dtype=np.uint8)
    names, target, told = filled(store, content), np.zeros_like(content), list[Row]()
    link = open_link("ucx://", "reader", 1)
    intake = Intake(link, LandingPool(link, WINDOW))
    landing = intake.open("read", WINDOW, lambda group, block, size: target[block - 5])
    used: list[RecordId] = []
    store.tier._order.touch = lambda keys, now: used.extend(keys)  # type: ignore[method-assign]
    try:
        async with asyncio.timeout(30.0), background(followed(link, intake), "notices"):
            served = await store.get(names, 5, False, IDENTITY, landing, told.append)
            verified = await intake.ready("read", 10.0)
    finally:
        await intake.close("read", Writer.FINISHED)
        await intake.aclose()
        await link.close()
    assert (served.blocks, served.anchor) == (BLOCKS, False)
    assert np.array_equal(target, content)
    assert [block for _, block, *_ in told] == list(range(5, 5 + BLOCKS))
    assert verified == {(group, block): (valid, size, seal) for group, block, valid, _, size, seal in told}
    assert used == [RecordId(RecordKind.BLOCK, name.key) for name in names], "each once"


async def followed(link: Link, intake: Intake) -> None:
    async for notice in link.notices():
        intake.noticed(notice)
