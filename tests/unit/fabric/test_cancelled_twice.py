"""A caller that is cancelled again while it waits for what must not be cut off goes on waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from fabric.errors import DeadlineExceeded, InvalidArgument, StaleTicket, Unavailable
from fabric.kvlink import Token, Write, landing, messages, open_link
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.leftovers import Leftovers
from fabric.kvlink.link import Region
from fabric.kvlink.messages import GaveUp, Trailing
from fabric.kvlink.outgoing import Leave, Sender, SendLimits
from fabric.kvlink.slabs import SlabState, Writer
from fabric.kvlink.verify import copy_rows, digest
from fabric.records import Landing, LinkAddress
from tests.support.link_peer import pieces, source_bytes


async def cancelled_twice(task: asyncio.Task[Any], then: Callable[[], object]) -> None:
    """Cancels, lets the task run, cancels again; `then` ends what it waits for."""
    for _ in range(2):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
    then()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_slab_is_held_until_the_thread_that_copies_from_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow_copy(*args: Any, **options: Any) -> int | None:
        begun.set()
        assert go_on.wait(10.0)
        return copy_rows(*args, **options)

    monkeypatch.setattr(landing, "copy_rows", slow_copy)
    link = open_link("inproc://", "decode-1", 1)
    size = 2 << 20
    pool, place = LandingPool(link, size), np.ones(size, np.uint8)
    pool.grant("t", size)
    row = (0, size, digest(np.zeros(size, np.uint8)), place)
    committing = asyncio.create_task(pool.commit_rows("t", [row]))
    await asyncio.to_thread(begun.wait, 10.0)
    pool.release("t", Writer.FINISHED)
    assert pool.state("t") is SlabState.GRANTED
    await cancelled_twice(committing, go_on.set)
    assert not place.any()
    assert pool.state("t") is SlabState.FREE
    await link.close()


class SlowLink:
    """A link whose writes wait to be let go, and fail where they are told to."""

    address = LinkAddress("x://", "p", 1)

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure, self.go_on, self.begun = failure, asyncio.Event(), asyncio.Event()
        self.said: list[bytes] = []
        self.writes = self.given_up = 0

    def lends(self, address: LinkAddress, region: Region) -> bool:
        return False

    def push_at_once(self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes) -> bool:
        return False

    async def push(self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes, timeout_s: float) -> None:
        if writes:
            self.writes += 1
            self.begun.set()
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.given_up += 1
                raise
            if self.failure is not None:
                raise self.failure
        self.said.append(notify)


async def transfer(link: SlowLink, leave: Leave | None = None) -> None:
    source = source_bytes(1)
    region = Region(Token(0, source.ctypes.data, source.nbytes), source)
    sender = Sender(link, SendLimits())  # type: ignore[arg-type]  # the part of a link that it uses
    landing = Landing("t", LinkAddress("x://", "d", 1), Token(0, 0, 4096).pack(), 0, 4096)
    async with sender.transfer(landing, leave=leave) as outgoing:
        await outgoing.send(pieces(region, [100]))


async def test_a_writer_says_that_it_is_done_only_after_its_last_write() -> None:
    link = SlowLink()
    sending = asyncio.create_task(transfer(link))
    await link.begun.wait()
    await cancelled_twice(sending, link.go_on.set)
    assert isinstance(messages.unpack(link.said[-1]), GaveUp)


async def test_a_writer_that_leaves_waits_for_no_write_and_the_rest_is_said_after_it() -> None:
    """The place in the queue is held as long: bytes in flight are bounded whoever still waits for them."""
    link, leftovers = SlowLink(), Leftovers(10.0)
    sender = Sender(link, SendLimits(in_flight_bytes=100))  # type: ignore[arg-type]  # the part of a link that it uses

    async def send(name: str) -> None:
        landing = Landing(name, LinkAddress("x://", "d", 1), Token(0, 0, 4096).pack(), 0, 4096)
        async with sender.transfer(landing, leave=partial(leftovers.keep, name)) as outgoing:
            await outgoing.send(pieces(region, [100]))

    source = source_bytes(1)
    region = Region(Token(0, source.ctypes.data, source.nbytes), source)
    first, second = asyncio.create_task(send("t")), asyncio.create_task(send("u"))
    await link.begun.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(first, 10.0)
    assert (link.said, link.writes, leftovers.pending) == ([], 1, 1)
    with pytest.raises(InvalidArgument, match="open"):
        await send("t")
    link.go_on.set()
    await leftovers.over("t")
    await second
    await leftovers.over("u")
    said = [messages.unpack(each) for each in link.said]
    assert link.writes == 2 and [each for each in said if isinstance(each, GaveUp)] == [GaveUp("t"), GaveUp("u")]


REFUSED_WHOLE = (StaleTicket("overtaken"), InvalidArgument("out of bounds"))


@pytest.mark.parametrize("failure", [None, *REFUSED_WHOLE, Unavailable("gone"), DeadlineExceeded("slow")], ids=repr)
async def test_who_waits_for_a_write_that_was_left_learns_whether_it_may_still_arrive(
    failure: Exception | None,
) -> None:
    over = failure is None or failure in REFUSED_WHOLE
    link, leftovers = SlowLink(failure), Leftovers(10.0)
    sending = asyncio.create_task(transfer(link, partial(leftovers.keep, "t")))
    await link.begun.wait()
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    link.go_on.set()
    assert await leftovers.over("t") == over
    assert isinstance(messages.unpack(link.said[-1]), GaveUp if over else Trailing)


async def test_the_end_of_the_process_gives_up_a_write_that_was_left() -> None:
    link, leftovers = SlowLink(), Leftovers(10.0)
    sending = asyncio.create_task(transfer(link, partial(leftovers.keep, "t")))
    await link.begun.wait()
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    await asyncio.wait_for(leftovers.aclose(), 10.0)
    assert link.writes == link.given_up == 1


async def test_a_write_that_failed_in_an_unknown_way_may_still_arrive() -> None:
    link = SlowLink(KeyError("a defect of a transport"))
    link.go_on.set()
    with pytest.raises(KeyError):
        await transfer(link)
    assert isinstance(messages.unpack(link.said[-1]), Trailing)


async def test_giving_up_a_landing_that_another_transfer_writes_to_says_nothing() -> None:
    """A ticket that was attached twice: the second request's failure must not end the first one's handoff."""
    link = SlowLink()
    sender = Sender(link, SendLimits())  # type: ignore[arg-type]  # the part of a link that it uses
    landing = Landing("t", LinkAddress("x://", "d", 1), Token(0, 0, 4096).pack(), 0, 4096)
    async with sender.transfer(landing):
        await sender.give_up(landing)
        assert link.said == []
    assert isinstance(messages.unpack(link.said[-1]), GaveUp)
