"""A read over a real link: what a reader of the same host is told while it still copies what it was told of before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import numpy as np
import pytest
from pydantic import SecretStr

from fabric.kvlink import messages, open_link
from fabric.kvlink.extents import Row
from fabric.kvlink.incoming import Intake
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.messages import Chunk
from fabric.kvlink.slabs import Writer
from fabric.kvlink.verify import digest
from fabric.records import Extent
from services.kvstore.records import ROOT, BlockName, Identity, Record, RecordId, RecordKind
from services.kvstore.service import build
from services.kvstore.settings import KvStoreSettings
from services.kvstore.store import Store
from services.worker.settings import WorkerSettings

IDENTITY = Identity("revision", "layout")
SIZE, BLOCKS = 1 << 20, 16
WINDOW = round(WorkerSettings.model_fields["window_mb"].default * SIZE)


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


async def test_a_reader_is_told_of_the_next_chunk_while_it_copies_one(store: Store) -> None:
    content = np.random.default_rng(3).integers(0, 256, (BLOCKS, SIZE), dtype=np.uint8)
    names, target, told = filled(store, content), np.zeros_like(content), list[Row]()
    link = open_link("ucx://", "reader", 1)
    intake = Intake(link, LandingPool(link, WINDOW))
    landing = intake.open("read", WINDOW, lambda group, block, size: target[block])
    try:
        async with asyncio.timeout(30.0), aclosing(link.notices()) as notices:
            reading = asyncio.create_task(store.get(names, 0, False, IDENTITY, landing, told.append))
            untaken = [await anext(notices) for _ in range(2)]
            chunks = [messages.unpack(notice.payload) for notice in untaken]
            assert all(isinstance(chunk, Chunk) and chunk.lent for chunk in chunks)
            assert [(chunk.number, len(chunk.extents)) for chunk in chunks] == [(0, BLOCKS // 2), (1, BLOCKS // 2)]
            for notice in untaken:
                assert intake.noticed(notice)
            served = await reading
            verified = await intake.ready("read", 10.0)
    finally:
        await intake.close("read", Writer.FINISHED)
        await intake.aclose()
        await link.close()
    assert (served.blocks, served.anchor) == (BLOCKS, False)
    assert np.array_equal(target, content)
    assert verified == {(group, block): (valid, size, seal) for group, block, valid, _, size, seal in told}
