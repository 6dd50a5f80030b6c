"""Mappings of peers on the same host: made where both ends allow it, for one incarnation, gone with their owner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from fabric.errors import InvalidArgument, StaleTicket, Unavailable
from fabric.kvlink import open_link
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.link import Token
from fabric.kvlink.shared import Mapping
from fabric.kvlink.ucx import UcxLink
from fabric.records import Landing
from tests.support.link_peer import ProcessPeer, Pusher, sealed, source_bytes

SEED, SIZE = 7, 300_000
StartPeer = Callable[..., Awaitable[ProcessPeer]]


def opened(url: str = "ucx://") -> UcxLink:
    link = open_link(url, f"here-{time.monotonic_ns()}", 1)
    assert isinstance(link, UcxLink)
    return link


@pytest.fixture
async def link() -> AsyncIterator[UcxLink]:
    found = opened()
    yield found
    await found.close()


@pytest.fixture
async def start_peer(tmp_path: Path) -> AsyncIterator[StartPeer]:
    async with AsyncExitStack() as stack:

        async def start(name: str = "there", epoch: int = 1, url: str = "ucx://") -> ProcessPeer:
            peer = ProcessPeer(url, name, epoch, SEED, tmp_path / f"{name}-{epoch}.log")
            stack.push_async_callback(peer.close)
            await peer.ready()
            return peer

        yield start


def mappings(link: UcxLink) -> list[Mapping]:
    assert link._neighbours.mapped is not None
    return link._neighbours.mapped.mappings.live()


async def pushed(link: UcxLink, landing: Landing) -> None:
    await Pusher(link, SEED).push(landing, [SIZE], landing.id, 10.0)


@pytest.mark.parametrize(("here", "there"), [("off", "on"), ("on", "off")])
async def test_where_one_end_maps_nothing_the_bytes_arrive_over_nixl(start_peer, here, there):
    link = opened(f"ucx://?mapped={here}")
    peer = await start_peer(url=f"ucx://?mapped={there}")
    landing = await peer.grant("t", SIZE)
    await pushed(link, landing)
    assert await peer.landed("t", SIZE) == sealed(SEED, [SIZE])[0].digest
    assert "mapped" not in link.lane and "cma" in link.lane
    pool = LandingPool(link, SIZE)
    assert await peer.push(pool.grant("back", SIZE), [SIZE], "back") == "ok"
    async with asyncio.timeout(10.0):
        assert (await anext(aiter(link.notices()))).payload == b"back"
    assert (pool._memory[:SIZE] == source_bytes(SEED)[:SIZE]).all()
    await link.close()


async def test_memory_is_mapped_once_and_let_go_when_its_owner_ends(link, start_peer):
    peer = await start_peer()
    for name in ("one", "two"):
        await pushed(link, await peer.grant(name, SIZE))
    assert len(mappings(link)) == 1 and link.lane.startswith("mapped/memory")
    landing = await peer.grant("three", SIZE)
    await peer.kill()
    async with asyncio.timeout(10.0):
        while mappings(link):  # noqa: ASYNC110 - the kernel wakes the link, not the test
            await asyncio.sleep(0.01)
    with pytest.raises(Unavailable):
        await pushed(link, landing)


async def test_a_newer_incarnation_is_never_reached_through_an_older_ones_mapping(link, start_peer):
    old_peer = await start_peer(epoch=1)
    old = await old_peer.grant("t", SIZE)
    await pushed(link, old)
    [mapping] = mappings(link)
    new_peer = await start_peer(epoch=2)
    new = await new_peer.grant("t", SIZE)
    assert Token.unpack(new.region).shared != Token.unpack(old.region).shared
    await pushed(link, new)
    assert await new_peer.landed("t", SIZE) == sealed(SEED, [SIZE])[0].digest
    assert mapping not in mappings(link) and len(mappings(link)) == 1
    with pytest.raises(StaleTicket):
        await pushed(link, old)


async def test_a_token_that_promises_more_than_there_is_is_not_written_through(link, start_peer):
    peer = await start_peer()
    landing = await peer.grant("t", SIZE)
    await pushed(link, landing)
    token = Token.unpack(landing.region)
    larger = Token(token.number, token.base, 2 * token.nbytes, token.shared).pack()
    beyond = Landing("t", landing.address, larger, token.nbytes, SIZE)
    with pytest.raises((InvalidArgument, Unavailable)):
        await pushed(link, beyond)
    assert (await peer.landed("t", SIZE)) == sealed(SEED, [SIZE])[0].digest


async def test_what_needs_no_waiting_is_done_when_the_call_returns(link, start_peer):
    peer = await start_peer()
    landing = await peer.grant("t", SIZE)
    pusher = Pusher(link, SEED)
    await pusher.push(landing, [SIZE], "", 10.0)  # maps the memory
    assert not link.push_at_once(landing.address, [], notify=bytes(4 << 20)), "more than a doorbell takes"
    assert link.push_at_once(landing.address, [], notify=b"said")
    await link.close()
    with pytest.raises(Unavailable):
        link.push_at_once(landing.address, [], notify=b"said")
