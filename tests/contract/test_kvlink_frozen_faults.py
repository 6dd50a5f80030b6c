"""A writer frozen in mid-push, given up, its slab retired, then woken: no live block changes by a byte."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from fabric.kvlink import Link, open_link
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.slabs import SlabState, Writer
from fabric.kvlink.verify import Placement
from tests.support.link_peer import ProcessPeer, sealed, source_bytes
from tests.support.promises import Recorder

OLD, NEW = 7 << 20, [60_000] * 20
LIVE = 8  # blocks of so many rounds are live at a time


class Ends:
    """This process with live blocks, a writer that freezes and one that does not."""

    def __init__(self, link: Link, frozen: ProcessPeer, healthy: ProcessPeer) -> None:
        self.link, self.frozen, self.healthy = link, frozen, healthy
        self.lane = ""
        self.pool = LandingPool(link, 16 << 20, slab_bytes=64 << 10, retire_after_s=0.0)
        self.live: list[list[Placement]] = []
        self.arrived: set[bytes] = set()
        self.changed = asyncio.Event()

    async def follow(self) -> None:
        with self.link.expecting():  # a retired slab alone keeps nobody looking
            async for notice in self.link.notices():
                self.arrived.add(notice.payload)
                self.changed.set()

    async def notice(self, payload: str) -> None:
        async with asyncio.timeout(20.0):
            while payload.encode() not in self.arrived:
                self.changed.clear()
                await self.changed.wait()

    def landed(self, owner: str) -> np.ndarray:
        start = self.pool._book.find(owner).first * self.pool.stats().slab_bytes
        return self.pool._memory[start : start + OLD]

    async def until_landed(self, owner: str, position: int) -> None:
        """Until the push has come so far."""
        landed = self.landed(owner)[position : position + 64]
        async with asyncio.timeout(20.0):
            while not landed.any():  # noqa: ASYNC110 - one-sided bytes wake nobody
                await asyncio.sleep(0)

    def wrong_bytes(self) -> int:
        """Bytes of live blocks that are not what their writer sealed."""
        truth = source_bytes(9)
        return sum(
            int((item.destination != truth[item.extent.offset : item.extent.end]).sum())
            for placements in self.live
            for item in placements
        )


@pytest.fixture(params=["tcp", "ucx", "ucx-nixl"])
async def ends(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ends]:
    url = {"tcp": "tcp://127.0.0.1", "ucx": "ucx://", "ucx-nixl": "ucx://?mapped=off"}[request.param]
    link = open_link(url, f"here-{time.monotonic_ns()}", 1)
    peers = [ProcessPeer(url, name, 1, seed, tmp_path / name) for name, seed in (("frozen", 7), ("healthy", 9))]
    both = Ends(link, *peers)
    both.lane = request.param
    following = asyncio.create_task(both.follow())
    for peer in peers:
        await peer.ready()
    yield both
    for peer in peers:
        await peer.close()
    await link.close()
    await following


async def freeze_give_up_and_wake(ends: Ends, number: int, rng: random.Random) -> str:
    """One round; tells when the writer was frozen: before, in mid-push or after."""
    old, new = f"old-{number}", f"new-{number}"
    landing = ends.pool.grant(old, OLD)
    ends.landed(old)[:] = 0
    await ends.frozen.start_push(landing, [OLD], old)
    await ends.until_landed(old, rng.randrange(OLD // 4))
    ends.frozen.freeze_now()
    assert ends.pool.release(old, Writer.UNKNOWN)
    ends.pool.sweep()
    assert ends.pool.state(old) is SlabState.RETIRED
    landed = int(np.count_nonzero(ends.landed(old)))
    other = ends.pool.grant(new, sum(NEW))
    assert await ends.healthy.push(other, NEW, new) == "ok"
    placements = [Placement(extent, np.zeros(extent.size, np.uint8)) for extent in sealed(9, NEW)]
    await ends.pool.commit(new, placements)
    assert ends.pool.release(new, Writer.FINISHED)
    ends.live = [*ends.live[1 - LIVE :], placements]
    await ends.frozen.thaw()
    assert await ends.frozen.pushed() == "ok"
    await ends.notice(old)
    assert np.array_equal(ends.landed(old), source_bytes(7)[:OLD]), "the late write did not happen: nothing was tested"
    assert ends.pool.release(old, Writer.FINISHED)
    full = int(np.count_nonzero(source_bytes(7)[:OLD]))
    return "before" if landed == 0 else "after" if landed == full else "in mid-push"


async def rounds(ends: Ends, count: int, seed: int) -> Counter[str]:
    rng, when, changed = random.Random(seed), Counter[str](), 0
    for number in range(count):
        when[await freeze_give_up_and_wake(ends, number, rng)] += 1
        changed += ends.wrong_bytes()
    assert changed == 0
    assert ends.pool.stats().free * ends.pool.stats().slab_bytes == 16 << 20
    return when


async def test_ten_frozen_writers_change_no_live_byte(ends):
    when = await rounds(ends, 10, seed=1)
    assert sum(when.values()) == 10


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.promise(4)
async def test_five_hundred_frozen_writers_change_no_live_byte(ends: Ends, promise: Recorder) -> None:
    when = await rounds(ends, 500, seed=2)
    assert sum(when.values()) == 500
    assert when["in mid-push"] >= 10, f"too few were frozen in mid-push: {dict(when)}"
    mid = when["in mid-push"]
    what = f"{ends.lane}: writers frozen, given up and woken ({mid} in mid-push), no live byte changed"
    promise(4, what, sum(when.values()), exactly=500)
