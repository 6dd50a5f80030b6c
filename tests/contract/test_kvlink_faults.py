"""A network that hurts: no push is believed that was damaged, none outlives its deadline."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import numpy as np
import pytest

from fabric.errors import DataLoss, DeadlineExceeded, InvalidArgument, ServiceError, StaleTicket, Unavailable
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.slabs import Writer
from fabric.kvlink.tcp import TcpLink
from fabric.kvlink.verify import Placement
from fabric.records import Landing
from tests.support.faultproxy import FaultProxy, Faults, fault_proxy
from tests.support.link_peer import Pusher, sealed

SIZES = [4000, 100, 20_000]
TOTAL = sum(SIZES)


class Ends:
    """A writer and a target with a fault proxy between them."""

    def __init__(self, proxy: FaultProxy, target: TcpLink, writer: TcpLink) -> None:
        self.proxy, self.target, self.writer = proxy, target, writer
        self.pool = LandingPool(target, 1 << 20, slab_bytes=4096)
        self.pusher = Pusher(writer, seed=3)

    def grant(self, owner: str) -> Landing:
        landing = self.pool.grant(owner, TOTAL)
        return dataclasses.replace(
            landing, address=dataclasses.replace(landing.address, url=f"tcp://{self.proxy.address}")
        )


@pytest.fixture
async def ends():
    target, writer = TcpLink("127.0.0.1", 0, "target", 1), TcpLink("127.0.0.1", 0, "writer", 1)
    async with fault_proxy(target.address.url.removeprefix("tcp://"), seed=11) as proxy:
        yield Ends(proxy, target, writer)
        await writer.close()
        await target.close()


def placements() -> list[Placement]:
    return [Placement(extent, np.zeros(extent.size, np.uint8)) for extent in sealed(3, SIZES)]


async def test_of_300_pushes_with_a_flipped_bit_none_is_believed(ends):
    """The bit may hit the payload (caught by the digest) or the frame (refused, or cut by the deadline)."""
    ends.proxy.faults = Faults(flip_every_bytes=TOTAL)
    caught = {"digest": 0, "frame": 0}
    for index in range(300):
        owner = f"t{index}"
        flips = ends.proxy.flipped
        try:
            await ends.pusher.push(ends.grant(owner), SIZES, owner, 0.5)
        except ServiceError as error:
            assert isinstance(error, DeadlineExceeded | Unavailable | InvalidArgument | StaleTicket)
            caught["frame"] += 1
        else:
            assert ends.proxy.flipped > flips
            await _expect_data_loss(ends, owner)
            caught["digest"] += 1
        ends.pool.release(owner, Writer.FINISHED)
    assert sum(caught.values()) == 300
    assert caught["digest"] > 200


async def _expect_data_loss(ends: Ends, owner: str) -> None:
    try:
        found = placements()
        await ends.pool.commit(owner, found)
    except DataLoss:
        return
    # The bit hit the notice alone: then every byte of payload must be right.
    assert all(np.array_equal(a.destination, b) for a, b in zip(found, _sources(), strict=True))
    async for notice in ends.target.notices():
        if notice.payload == owner.encode():
            raise AssertionError(f"{owner}: a flipped bit was believed")
        return


def _sources() -> list[np.ndarray]:
    from tests.support.link_peer import source_bytes

    memory = source_bytes(3)
    return [memory[extent.offset : extent.end] for extent in sealed(3, SIZES)]


@pytest.mark.parametrize(
    "faults",
    [Faults(black_hole=True), Faults(half_open=True), Faults(drip_bytes_per_s=2000)],
    ids=["hole", "half", "drip"],
)
async def test_a_push_through_a_sick_network_ends_by_its_deadline(ends, faults):
    await ends.pusher.push(ends.grant("well"), SIZES, "well", 5.0)
    ends.proxy.faults = faults
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await ends.pusher.push(ends.grant("sick"), SIZES, "sick", 0.5)
    assert time.monotonic() - started < 5.5
    ends.proxy.faults = Faults()
    await ends.pusher.push(ends.grant("well-again"), SIZES, "well-again", 5.0)


async def test_a_connection_cut_in_mid_push_is_unavailable_and_the_next_push_works(ends):
    ends.proxy.faults = Faults(drip_bytes_per_s=10_000)
    pushing = asyncio.create_task(ends.pusher.push(ends.grant("cut"), SIZES, "cut", 10.0))
    async with asyncio.timeout(5.0):
        while not ends.proxy.forwarded:  # noqa: ASYNC110 - the proxy tells nobody
            await asyncio.sleep(0.005)
    ends.proxy.cut()
    with pytest.raises(Unavailable):
        await pushing
    ends.proxy.faults = Faults()
    await ends.pusher.push(ends.grant("next"), SIZES, "next", 5.0)
    found = placements()
    await ends.pool.commit("next", found)
