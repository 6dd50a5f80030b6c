"""Pipelined transfers through a small window on a machine that is busy with other work: none stops, none is wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fabric.kvlink import open_link
from fabric.kvlink.incoming import Intake
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.slabs import Writer
from fabric.kvlink.verify import digest
from kernels.host.sealed_copy import copy_sealed
from tests.support import procs
from tests.support.link_peer import Placed, ProcessPeer, source_bytes
from tests.support.promises import Recorder

SIZES = [60_000] * 139  # 8.3 MB
WINDOW, CHUNK = 1 << 20, 256 << 10
BURNERS = 3  # more than there are cores on the smallest machine that runs this
SEED = 11
TIMEOUT_S = 10.0


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[None]:
    """Processes that want every core all the time."""
    with ExitStack() as stack:
        for number in range(BURNERS):
            stack.enter_context(procs.spawn(procs.python("-c", "while True: pass"), tmp_path / f"burner{number}.log"))
        yield


@pytest.mark.promise(11)
@pytest.mark.parametrize("transfers", [20, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
async def test_no_transfer_over_ucx_stops_waiting_for_credit_under_load(
    transfers: int, tmp_path: Path, busy: None, promise: Recorder
) -> None:
    link = open_link("ucx://", "here", 1)
    pool = LandingPool(link, 4 << 20, kernel=copy_sealed)
    intake = Intake(link, pool)
    peer = ProcessPeer("ucx://", "there", 1, SEED, tmp_path / "there.log")
    wanted = digest(source_bytes(SEED)[: sum(SIZES)])

    async def follow() -> None:
        async for notice in link.notices():
            intake.noticed(notice)

    following = asyncio.create_task(follow())
    try:
        await peer.ready()
        slowest_s = 0.0
        for number in range(transfers):
            owner, placed, began = f"t{number}", Placed(), time.monotonic()
            await peer.start_pipe(intake.open(owner, WINDOW, placed), SIZES, CHUNK, timeout_s=TIMEOUT_S)
            assert await peer.pushed() == "ok", f"transfer {number}"
            await intake.ready(owner, TIMEOUT_S)
            slowest_s = max(slowest_s, time.monotonic() - began)
            await intake.close(owner, Writer.FINISHED)
            assert placed.digest() == wanted, f"transfer {number}"
        what = f"{transfers} transfers through a small window beside {BURNERS} busy loops: slowest"
        promise(11, what, slowest_s, at_most=TIMEOUT_S, unit="s")
        assert pool.stats().free == (4 << 20) // pool.stats().slab_bytes
    finally:
        following.cancel()
        await peer.close()
        await intake.aclose()
        await link.close()
