"""What every KV transport promises, and what the landing desk makes of a writer that cannot be fenced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path

import numpy as np
import pytest

from fabric.errors import (
    DataLoss,
    DeadlineExceeded,
    Exhausted,
    Internal,
    InvalidArgument,
    ServiceError,
    StaleTicket,
    StartError,
    Unavailable,
)
from fabric.kvlink import Link, open_link
from fabric.kvlink.inproc import InprocLink
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.lanes import Expectation, LaneKind
from fabric.kvlink.link import Notice
from fabric.kvlink.plan import write_to
from fabric.kvlink.slabs import SlabState, Writer
from fabric.kvlink.ucx import UcxLink
from fabric.kvlink.verify import Placement
from tests.support.link_peer import InprocPeer, Peer, ProcessPeer, Pusher, sealed, source_bytes

SEED = 7
SIZES = [65536, 4096, 300_000, 1, 65536]
TOTAL = sum(SIZES)
CAPACITY = 4 << 20

StartPeer = Callable[..., Awaitable[Peer]]


@pytest.fixture(params=["inproc", "tcp", "ucx", "ucx-nixl"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(transport: str) -> str:
    return {
        "inproc": "inproc://",
        "tcp": "tcp://127.0.0.1",
        "ucx": "ucx://",  # memory of the same host is mapped
        "ucx-nixl": "ucx://?mapped=off",
    }[transport]


@pytest.fixture
async def link(url: str, request: pytest.FixtureRequest) -> AsyncIterator[Link]:
    opened = open_link(url, f"here-{time.monotonic_ns()}", 1)
    yield opened
    await opened.close()
    await opened.close()


@pytest.fixture
async def start_peer(transport: str, url: str, tmp_path: Path) -> AsyncIterator[StartPeer]:
    async with AsyncExitStack() as stack:
        started = 0

        async def start(name: str = "there", epoch: int = 1, seed: int = SEED) -> Peer:
            nonlocal started
            started += 1
            if transport == "inproc":
                opened = open_link(url, name, epoch)
                assert isinstance(opened, InprocLink)
                inproc = InprocPeer(opened, seed)
                stack.push_async_callback(inproc.close)
                return inproc
            peer = ProcessPeer(url, name, epoch, seed, tmp_path / f"peer-{started}.log")
            stack.push_async_callback(peer.close)
            await peer.ready()
            return peer

        yield start


@pytest.fixture
def pool(link: Link) -> LandingPool:
    return LandingPool(link, CAPACITY, slab_bytes=64 << 10, retire_after_s=1e9)


async def next_notice(link: Link, timeout_s: float = 10.0) -> Notice:
    async with asyncio.timeout(timeout_s):
        async for notice in link.notices():
            return notice
    raise AssertionError("the link closed")


async def no_notice(link: Link, for_s: float = 0.3) -> None:
    with pytest.raises(TimeoutError):
        await next_notice(link, for_s)


def placements(sizes: list[int] = SIZES, seed: int = SEED) -> list[Placement]:
    return [Placement(extent, np.zeros(extent.size, np.uint8)) for extent in sealed(seed, sizes)]


def arrived(found: list[Placement], seed: int = SEED) -> bool:
    memory = source_bytes(seed)
    return all(np.array_equal(item.destination, memory[item.extent.offset : item.extent.end]) for item in found)


async def test_bytes_and_one_notice_land_in_the_named_slab_and_nowhere_else(link, pool, start_peer):
    peer = await start_peer()
    before, landing, after = (pool.grant(owner, 64 << 10) for owner in ("before", "wanted-0", "after"))
    landing = pool.grant("wanted", TOTAL)
    assert await peer.push(landing, SIZES, "wanted") == "ok"
    assert await next_notice(link) == Notice("there", 1, b"wanted")
    await no_notice(link)
    found = placements()
    await pool.commit("wanted", found)
    assert arrived(found)
    for other in (before, after):
        untouched = np.ones(64 << 10, np.uint8)
        zeros = sealed_zeros(64 << 10)
        await pool.commit(other.id, [Placement(zeros, untouched)])
        assert not untouched.any()


async def test_many_pushes_arrive_exactly_once_each(link, pool, start_peer):
    peer = await start_peer()
    names = [f"ticket-{index}" for index in range(20)]
    for name in names:
        assert await peer.push(pool.grant(name, TOTAL), SIZES, name) == "ok"
        assert (await next_notice(link)).payload == name.encode()
        found = placements()
        await pool.commit(name, found)
        assert arrived(found)
        assert pool.release(name, Writer.FINISHED)
    await no_notice(link)
    assert pool.stats().free * pool.stats().slab_bytes == CAPACITY


async def test_one_flipped_bit_is_data_loss_that_names_group_and_block(link, pool, start_peer):
    peer = await start_peer()
    assert await peer.push(pool.grant("t", TOTAL), SIZES, "t") == "ok"
    await next_notice(link)
    offset = sum(SIZES[:2]) + 150_000
    pool._memory[pool._book.find("t").first * pool.stats().slab_bytes + offset] ^= 0x10
    with pytest.raises(DataLoss, match="group latent block 2"):
        await pool.commit("t", placements())
    assert pool.stats().digest_mismatches_total == 1


async def test_committing_before_the_push_is_data_loss_not_old_bytes(pool):
    pool.grant("t", TOTAL)
    with pytest.raises(DataLoss):
        await pool.commit("t", placements())


async def test_a_push_to_a_killed_peer_fails_soon(link, start_peer):
    peer = await start_peer()
    pusher = Pusher(link, SEED)
    landing = await peer.grant("t", TOTAL)
    await pusher.push(landing, SIZES, "t", 10.0)
    assert await peer.landed("t", SIZES[0]) == sealed(SEED, SIZES)[0].digest
    await peer.kill()
    started = time.monotonic()
    with pytest.raises(Unavailable):
        await pusher.push(landing, SIZES, "t", 10.0)
    assert time.monotonic() - started < 5.0


async def test_a_push_to_a_frozen_peer_ends_by_its_deadline(transport, link, start_peer):
    peer = await start_peer()
    pusher = Pusher(link, SEED)
    small, large = await peer.grant("small", 1000), await peer.grant("large", 7 << 20)
    await pusher.push(small, [1000], "small", 10.0)
    await peer.freeze()
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded) if transport != "ucx" else nullcontext():
        await pusher.push(large, [7 << 20], "large", 0.5)
    took = time.monotonic() - started
    await peer.thaw()
    if transport == "ucx":  # nothing is asked of the owner of mapped memory
        assert await peer.landed("large", 7 << 20) == sealed(SEED, [7 << 20])[0].digest
    assert took < 1.5 if transport == "ucx" else 0.4 < took < 1.5


async def test_a_writer_that_dies_in_mid_push_is_quarantined_then_freed_by_proof_of_death(link, pool, start_peer):
    peer = await start_peer()
    await peer.freeze()
    await peer.start_push(pool.grant("t", TOTAL), SIZES, "t")
    assert pool.release("t", Writer.UNKNOWN)
    assert pool.state("t") is SlabState.QUARANTINED
    await peer.kill()
    assert pool.release("t", Writer.DEAD)
    assert pool.stats().free * pool.stats().slab_bytes == CAPACITY
    with pytest.raises(InvalidArgument):
        await pool.commit("t", placements())


async def test_a_frozen_writer_that_wakes_up_late_changes_no_destination(link, pool, start_peer):
    peer = await start_peer()
    given_up = pool.grant("old", TOTAL)
    await peer.freeze()
    await peer.start_push(given_up, SIZES, "old")
    pool.release("old", Writer.UNKNOWN)
    # The next request gets other memory, is filled by another writer and committed.
    other, found = await start_peer("other", seed=9), placements(seed=9)
    landing = pool.grant("new", TOTAL)
    assert (landing.offset, landing.region) != (given_up.offset, given_up.region)
    assert await other.push(landing, SIZES, "new") == "ok"
    assert (await next_notice(link)).payload == b"new"
    await pool.commit("new", found)
    await peer.thaw()
    assert await peer.pushed() == "ok"  # nothing fenced it: its bytes did land, in quarantine
    assert await next_notice(link) == Notice("there", 1, b"old")
    slab = pool._book.find("old").first * pool.stats().slab_bytes
    assert np.array_equal(pool._memory[slab : slab + TOTAL], source_bytes(SEED)[:TOTAL])
    assert arrived(found, seed=9)
    with pytest.raises(InvalidArgument):
        await pool.commit("old", placements())
    assert pool.release("old", Writer.FINISHED)
    assert pool.state("old") is SlabState.FREE


async def test_an_address_of_an_older_epoch_is_refused(link, start_peer):
    pusher = Pusher(link, SEED)
    old_peer = await start_peer("worker", epoch=1)
    old = await old_peer.grant("t", 1000)
    await pusher.push(old, [1000], "t", 10.0)
    await old_peer.kill()
    new_peer = await start_peer("worker", epoch=2)
    new = await new_peer.grant("t", 1000)
    await pusher.push(new, [1000], "t", 10.0)
    with pytest.raises(StaleTicket):
        await pusher.push(old, [1000], "t", 10.0)
    assert await new_peer.landed("t", 1000) == sealed(SEED, [1000])[0].digest


async def test_an_old_address_never_reaches_the_new_incarnation(link, url, start_peer):
    """The writer has not heard of the new epoch: the transport itself must not deliver."""
    pusher = Pusher(link, SEED)
    old_peer = await start_peer("worker", epoch=1)
    old = await old_peer.grant("t", 1000)
    await old_peer.kill()
    new_peer = await start_peer("worker", epoch=2)
    await new_peer.grant("t", 1000)
    before = await new_peer.landed("t", 1000)
    with pytest.raises((StaleTicket, Unavailable, DeadlineExceeded)):
        await pusher.push(old, [1000], "t", 3.0)
    assert await new_peer.landed("t", 1000) == before


async def test_a_write_outside_its_landing_or_region_is_refused_before_any_byte(link, pool, start_peer):
    peer = await start_peer()
    pusher = Pusher(link, SEED)
    landing = await peer.grant("t", 1000)
    zero, many = np.zeros(1, np.int64), np.array([1001], np.int64)
    with pytest.raises(InvalidArgument):
        write_to(landing, pusher.source, zero, zero, many)
    outside = write_to(landing, pusher.source, np.array([1 << 40]), zero, np.array([1000]))
    with pytest.raises(InvalidArgument):
        await link.push(landing.address, [outside], notify=b"x", timeout_s=5.0)


async def test_a_notice_without_bytes_arrives(link, start_peer, pool):
    peer = await start_peer()
    landing = pool.grant("t", 10)
    assert await peer.push(landing, [], "finished") == "ok"
    assert (await next_notice(link)).payload == b"finished"


async def test_concurrent_pushes_of_many_owners_do_not_mix(link, pool, start_peer):
    peers = {f"writer-{seed}": await start_peer(f"writer-{seed}", seed=seed) for seed in (1, 2, 3)}
    landings = {name: pool.grant(name, TOTAL) for name in peers}
    results = await asyncio.gather(*(peer.push(landings[name], SIZES, name) for name, peer in peers.items()))
    assert results == ["ok"] * 3
    assert {(await next_notice(link)).payload.decode() for _ in peers} == set(peers)
    for name in peers:
        seed = int(name.rpartition("-")[2])
        found = placements(seed=seed)
        await pool.commit(name, found)
        assert arrived(found, seed)


async def test_an_idle_link_uses_less_than_half_a_percent_of_a_core(url, transport, start_peer, link, pool):
    """Idle means connected, with nothing granted here; measured over the child, which has answered a push."""
    if transport == "inproc":
        return  # no process of its own
    peer = await start_peer()
    assert await peer.push(pool.grant("t", TOTAL), SIZES, "t") == "ok"
    await next_notice(link)
    pool.release("t", Writer.FINISHED)
    for _ in range(3):  # what this process and the machine do beside it can only add
        before, here = await peer.cpu_s(), time.process_time()
        await asyncio.sleep(3.0)
        there, here = await peer.cpu_s() - before, time.process_time() - here
        if there / 3.0 < 0.005 and here / 3.0 < 0.01:  # this process also runs the test
            return
    pytest.fail(f"{there / 3.0:.2%} of a core there, {here / 3.0:.2%} here")


async def test_a_peer_leaves_cleanly(transport, start_peer, link, pool):
    if transport == "inproc":
        return
    peer = await start_peer()
    assert await peer.push(pool.grant("t", TOTAL), SIZES, "t") == "ok"
    assert await peer.end() == 0


async def test_the_lane_is_known_after_the_first_push(link, start_peer, transport):
    peer = await start_peer()
    await Pusher(link, SEED).push(await peer.grant("t", 1000), [1000], "t", 10.0)
    assert {"inproc": "inproc", "tcp": "tcp", "ucx": "mapped/memory"}.get(transport, "cma/memory") in link.lane
    assert transport == "ucx" or "mapped" not in link.lane


async def test_a_closed_link_ends_its_notices_and_its_pushes(url, start_peer):
    peer = await start_peer()
    link = open_link(url, "leaving", 1)
    pusher, landing = Pusher(link, SEED), await peer.grant("t", 1000)
    await link.close()
    async with asyncio.timeout(10.0):
        assert [notice async for notice in link.notices()] == []
    with pytest.raises(ServiceError):
        await pusher.push(landing, [1000], "t", 1.0)


async def test_closing_does_not_wait_for_a_frozen_peer(transport, url, start_peer):
    peer = await start_peer()
    link = open_link(url, "leaving", 1)
    pusher = Pusher(link, SEED)
    await pusher.push(await peer.grant("small", 1000), [1000], "small", 10.0)
    large = await peer.grant("large", 7 << 20)
    await peer.freeze()
    with pytest.raises(DeadlineExceeded) if transport != "ucx" else nullcontext():
        await pusher.push(large, [7 << 20], "large", 0.3)
    async with asyncio.timeout(10.0):
        await link.close()
    await peer.thaw()


@pytest.mark.parametrize("url", ["", "rdma://", "ucx"])
async def test_an_unknown_transport_is_a_start_error(url):
    with pytest.raises(StartError, match="no KV transport"):
        open_link(url, "x", 1)


async def test_memory_that_cannot_be_written_is_refused(link):
    frozen = np.zeros(10, np.uint8)
    frozen.flags.writeable = False
    for buffer in (frozen, np.zeros((4, 4), np.uint8)[:, ::2], np.zeros(0, np.uint8)):
        with pytest.raises(InvalidArgument):
            link.register(buffer)


async def test_a_full_pool_refuses_and_serves_again_after_a_release(pool):
    pool.grant("all", CAPACITY)
    with pytest.raises(Exhausted):
        pool.grant("more", 1)
    pool.release("all", Writer.NEVER_STARTED)
    assert pool.grant("more", 1).size == 1


def sealed_zeros(size: int):
    from fabric.kvlink.verify import digest
    from fabric.records import Extent

    return Extent("latent", 0, 1, 0, size, digest(np.zeros(size, np.uint8)))


async def test_a_push_over_another_lane_than_expected_fails_every_time_and_says_which(transport, link, start_peer):
    if not isinstance(link, UcxLink):
        assert open_link_fails(f"{transport}://127.0.0.1?expect=cuda-ipc")
        return
    peer = await start_peer()
    link._expected = Expectation(LaneKind.CUDA_IPC)  # which never carries memory of the host
    pusher, landing = Pusher(link, SEED), await peer.grant("t", 1000)
    for _ in range(2):
        with pytest.raises(Unavailable, match="not cuda-ipc"):
            await pusher.push(landing, [1000], "t", 10.0)


def open_link_fails(url: str) -> bool:
    with pytest.raises(StartError, match="cuda-ipc"):
        open_link(url, "x", 1)
    return True


async def test_a_link_that_lends_nothing_is_not_told_that_it_was_read(transport, link):
    if transport == "ucx":
        link.was_read(link.address)
        return
    with pytest.raises(Internal):
        link.was_read(link.address)
