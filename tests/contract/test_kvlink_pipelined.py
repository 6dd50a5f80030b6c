"""Pipelined transfers over every transport: more bytes than landing memory, each verified into its place once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

from fabric.errors import Cancelled, DataLoss, DeadlineExceeded, InvalidArgument, ServiceError, Unavailable
from fabric.kvlink import Link, open_link
from fabric.kvlink.incoming import Intake
from fabric.kvlink.inproc import InprocLink
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.outgoing import Sender, SendLimits
from fabric.kvlink.slabs import SlabState, Writer
from fabric.kvlink.verify import digest
from tests.support.link_peer import (
    SOURCE_BYTES,
    InprocPeer,
    Peer,
    Placed,
    ProcessPeer,
    pieces,
    source_bytes,
    source_region,
)

SEED = 7
BLOCK = 60_000
SIZES = [BLOCK] * 100 + [1]  # 6 MB
WINDOW = 1 << 20
CHUNK = 256 << 10
CAPACITY = 4 << 20
LIMITS = SendLimits(CHUNK, 1 << 20, timeout_s=10.0)

StartPeer = Callable[..., Awaitable[Peer]]


URLS = {"inproc": "inproc://", "tcp": "tcp://127.0.0.1", "ucx-nixl": "ucx://?mapped=off"}


@pytest.fixture(params=["inproc", "tcp", "ucx", "ucx-lent", "ucx-nixl"])
def lane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(lane: str) -> str:
    return URLS.get(lane, "ucx://")


@pytest.fixture
def lends(lane: str) -> bool:
    """Whether sources lie where their receiver reads them."""
    return lane == "ucx-lent"


@pytest.fixture
async def start_peer(url: str, lends: bool, tmp_path: Path) -> AsyncIterator[StartPeer]:
    async with AsyncExitStack() as stack:

        async def start(name: str = "there", seed: int = SEED) -> Peer:
            if url.startswith("inproc"):
                opened = open_link(url, name, 1)
                assert isinstance(opened, InprocLink)
                peer: Peer = InprocPeer(opened, seed)
            else:
                peer = ProcessPeer(url, name, 1, seed, tmp_path / f"{name}.log", lends)
            stack.push_async_callback(peer.close)
            if isinstance(peer, ProcessPeer):
                await peer.ready()
            return peer

        yield start


async def until(condition: Callable[[], bool]) -> None:
    """What becomes true by other tasks of this loop."""
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110 - the state belongs to code that announces it to nobody
            await asyncio.sleep(0.001)


class Here:
    """This process's end: both halves on one link, fed by one follower."""

    def __init__(self, link: Link, lends: bool) -> None:
        self.link = link
        self.pool = LandingPool(link, CAPACITY, slab_bytes=64 << 10, retire_after_s=1e9)
        self.intake = Intake(link, self.pool)
        self.sender = Sender(link, LIMITS)
        self.source = source_region(link, SEED, lends)
        self.lose = b""  # first byte of a kind of message, of which one is lost
        self.follower = asyncio.create_task(self.follow())

    async def follow(self) -> None:
        async for notice in self.link.notices():
            if self.lose and notice.payload.startswith(self.lose):
                self.lose = b""
                continue
            assert self.sender.noticed(notice) or self.intake.noticed(notice)

    @property
    def free_bytes(self) -> int:
        return self.pool.stats().free * self.pool.stats().slab_bytes

    async def until_free(self) -> None:
        await until(lambda: self.free_bytes == CAPACITY)


@pytest.fixture
async def here(url: str, lends: bool) -> AsyncIterator[Here]:
    link = open_link(url, f"here-{time.monotonic_ns()}", 1)
    ends = Here(link, lends)
    yield ends
    await ends.intake.aclose()
    await link.close()
    await ends.follower


def wanted(sizes: list[int], seed: int = SEED) -> int:
    return digest(source_bytes(seed)[: sum(sizes)])


async def test_six_megabytes_arrive_verified_through_a_window_of_one(here, start_peer):
    peer, placed = await start_peer(), Placed()
    landing = here.intake.open("t", WINDOW, placed)
    await peer.start_pipe(landing, SIZES, CHUNK)
    extents = await here.intake.ready("t", 20.0)
    assert await peer.pushed() == "ok"
    assert [block for _, block in extents] == list(range(len(SIZES)))
    assert placed.digest() == wanted(SIZES)
    assert here.free_bytes == CAPACITY  # returned with the last chunk, before anybody closes
    await here.intake.close("t", Writer.UNKNOWN)
    assert here.free_bytes == CAPACITY


async def test_a_last_chunks_notice_that_is_lost_is_announced_again(here, start_peer):
    peer, placed = await start_peer(), Placed()
    here.lose = b"\x10"
    await peer.start_pipe(here.intake.open("t", WINDOW, placed), [BLOCK], CHUNK)
    assert len(await here.intake.ready("t", 5.0)) == 1
    assert await peer.pushed() == "ok"
    assert here.lose == b"" and placed.digest() == wanted([BLOCK])


async def test_a_lost_confirmation_is_said_again_though_the_transfer_is_closed(here, start_peer):
    peer = await start_peer()
    landing = await peer.open("t", WINDOW)
    here.lose = b"\x12"
    async with here.sender.transfer(landing) as outgoing:
        sending = asyncio.create_task(outgoing.send(pieces(here.source, [BLOCK]), last=True))
        assert await peer.opened("t") == wanted([BLOCK])  # verified and closed
        await sending
    assert here.lose == b""


async def test_credit_comes_back_to_a_sender_here(here, start_peer, lends):
    peer = await start_peer()
    landing = await peer.open("t", WINDOW)
    async with here.sender.transfer(landing) as outgoing:
        for first in range(0, len(SIZES), 7):  # as prefill does: some blocks at a time
            batch = pieces(here.source, SIZES)[first : first + 7]
            await outgoing.send(batch, last=first + 7 >= len(SIZES))
    assert await peer.opened("t") == wanted(SIZES)
    assert not lends or here.link.lane.startswith("mapped/memory")


async def test_what_fits_whole_asks_for_no_credit_before_it_is_sent_again(here, start_peer, lends):
    """As a prompt that was preempted: the second time finds the landing full, and then there is credit to wait for."""
    peer = await start_peer()
    sizes = [60_000, 60_000, 40_000]
    async with here.sender.transfer(await peer.open("t", sum(sizes)), sum(sizes)) as outgoing:
        await outgoing.send(pieces(here.source, sizes))
        assert outgoing._asked == lends  # what is lent must be given back
        await outgoing.send(pieces(here.source, sizes), last=True)
        assert outgoing._asked
    assert await peer.opened("t") == wanted(sizes)


async def test_a_chunks_notice_that_is_lost_is_announced_again(here, start_peer):
    peer, placed = await start_peer(), Placed()
    here.lose = b"\x10"
    await peer.start_pipe(here.intake.open("t", WINDOW, placed), SIZES, CHUNK)
    await here.intake.ready("t", 20.0)
    assert await peer.pushed() == "ok"
    assert here.lose == b""
    assert placed.digest() == wanted(SIZES)


async def test_an_extent_that_fits_only_an_empty_landing_finds_its_place_though_nobody_asked_for_credit_yet(
    here, start_peer
):
    peer = await start_peer()
    sizes = [40_000, 70_000, 30_000, 100_000]
    async with here.sender.transfer(await peer.open("t", 100_000)) as outgoing:
        await outgoing.send(pieces(here.source, sizes), last=True)
    assert await peer.opened("t") == wanted(sizes)


async def test_a_lost_notice_that_asks_for_credit_is_announced_again(here, start_peer):
    peer, placed = await start_peer(), Placed()
    here.lose = b"\x10"  # the first chunk is more than half of the landing, so it asks
    await peer.start_pipe(here.intake.open("t", 100_000, placed), SIZES, CHUNK)
    await here.intake.ready("t", 20.0)
    assert await peer.pushed() == "ok"
    assert here.lose == b""
    assert placed.digest() == wanted(SIZES)


async def test_a_credit_that_is_lost_is_said_again(here, start_peer):
    peer = await start_peer()
    here.lose = b"\x12"
    async with here.sender.transfer(await peer.open("t", 256 << 10)) as outgoing:
        await outgoing.send(pieces(here.source, SIZES), last=True)
    assert here.lose == b""
    assert await peer.opened("t") == wanted(SIZES)


async def test_many_transfers_at_once_do_not_mix_and_all_memory_returns(here, start_peer):
    peers = {seed: await start_peer(f"writer-{seed}", seed) for seed in (1, 2, 3)}
    placed = {seed: Placed() for seed in peers}
    for seed, peer in peers.items():
        await peer.start_pipe(here.intake.open(f"t{seed}", WINDOW, placed[seed]), SIZES, CHUNK)
    for seed, peer in peers.items():
        await here.intake.ready(f"t{seed}", 20.0)
        assert await peer.pushed() == "ok"
        assert placed[seed].digest() == wanted(SIZES, seed)
    assert here.free_bytes == CAPACITY


async def test_an_extent_that_is_not_as_sealed_ends_the_transfer_on_both_sides(here, start_peer):
    peer = await start_peer()
    landing = here.intake.open("t", WINDOW, Placed())
    await peer.start_pipe(landing, SIZES, CHUNK, wrong=30)
    with pytest.raises(DataLoss, match="group latent block 30"):
        await here.intake.ready("t", 20.0)
    assert await peer.pushed() == "data_loss"
    await here.intake.close("t", Writer.UNKNOWN)
    await here.until_free()  # the writer said that it writes no more


async def test_a_frozen_sender_is_given_up_and_its_window_returns_when_it_wakes(here, start_peer):
    peer, placed = await start_peer(), Placed()
    landing = here.intake.open("t", WINDOW, placed)
    await peer.start_pipe(landing, SIZES, CHUNK)
    await until(lambda: bool(placed.blocks))
    await peer.freeze()
    with suppress(DeadlineExceeded):  # a fast one may have been done before
        await here.intake.ready("t", 0.2)
    await here.intake.close("t", Writer.UNKNOWN)
    assert here.pool.state("t") in (SlabState.QUARANTINED, SlabState.FREE)
    before = placed.digest()
    await peer.thaw()
    assert await peer.pushed() in ("ok", "cancelled")
    await here.until_free()
    assert placed.digest() == before


async def test_a_killed_receiver_ends_the_send_in_time(here, start_peer):
    peer = await start_peer()
    landing = await peer.open("t", WINDOW)
    with pytest.raises((Unavailable, DeadlineExceeded)):
        async with here.sender.transfer(landing) as outgoing:
            await outgoing.send(pieces(here.source, SIZES)[:4])
            await peer.kill()
            started = time.monotonic()
            await outgoing.send(pieces(here.source, SIZES)[4:], last=True)
    assert time.monotonic() - started < LIMITS.timeout_s + 5.0


async def test_a_transfer_that_ends_early_says_so(here, start_peer):
    peer = await start_peer()
    landing = await peer.open("t", WINDOW)
    async with here.sender.transfer(landing) as outgoing:
        await outgoing.send(pieces(here.source, SIZES)[:4])
    assert await peer.opened("t") == "cancelled"


async def test_an_empty_last_chunk_completes_a_transfer(here, start_peer):
    peer = await start_peer()
    landing = await peer.open("t", WINDOW)
    async with here.sender.transfer(landing) as outgoing:
        await outgoing.send(pieces(here.source, SIZES)[:20])
        await outgoing.send([], last=True)
    assert await peer.opened("t") == wanted(SIZES[:20])


async def test_an_extent_larger_than_its_landing_is_refused(here, start_peer):
    peer = await start_peer()
    landing = await peer.open("t", 64 << 10)
    with pytest.raises(InvalidArgument):
        async with here.sender.transfer(landing) as outgoing:
            await outgoing.send(pieces(here.source, [(64 << 10) + 1]), last=True)
    with pytest.raises(ServiceError, match="open"):
        async with here.sender.transfer(landing), here.sender.transfer(landing):
            pass


async def test_closing_waits_for_the_copy_that_runs_and_nothing_is_placed_after_it(here, start_peer):
    peer, placed = await start_peer(), Placed()
    landing = here.intake.open("t", WINDOW, placed)
    await peer.start_pipe(landing, SIZES, CHUNK)
    await until(lambda: bool(placed.blocks))
    await here.intake.close("t", Writer.UNKNOWN)
    before = {key: block.copy() for key, block in placed.blocks.items()}
    assert await peer.pushed() in ("ok", "cancelled")
    assert placed.blocks.keys() == before.keys()
    assert all(np.array_equal(placed.blocks[key], block) for key, block in before.items())
    with pytest.raises((InvalidArgument, Cancelled)):
        await here.intake.ready("t", 1.0)
    await here.until_free()


def test_the_sources_suffice():
    assert sum(SIZES) <= SOURCE_BYTES
