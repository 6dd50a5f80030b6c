"""Memory that is lent and then used anew, or that its reader may not open: nothing wrong is taken, nothing is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fabric.errors import Cancelled, DataLoss, DeadlineExceeded
from fabric.kvlink import Link, open_link
from fabric.kvlink.outgoing import Sender, SendLimits
from fabric.kvlink.ucx import UcxLink
from fabric.kvlink.verify import digest
from tests.support.link_peer import ProcessPeer, pieces, source_bytes, source_region

SEED, WINDOW, CHUNK = 7, 1 << 20, 256 << 10
SIZES = [60_000] * 40


class Here:
    """A sender with memory that it lends."""

    def __init__(self, link: Link) -> None:
        self.link, self.source = link, source_region(link, SEED, lends=True)
        self.senders: list[Sender] = []
        self.follower = asyncio.create_task(self.follow())

    def sender(self, timeout_s: float) -> Sender:
        self.senders.append(Sender(self.link, SendLimits(CHUNK, WINDOW, timeout_s)))
        return self.senders[-1]

    async def follow(self) -> None:
        async for notice in self.link.notices():
            for sender in self.senders:
                sender.noticed(notice)


@pytest.fixture
async def here() -> AsyncIterator[Here]:
    link = open_link("ucx://", f"here-{time.monotonic_ns()}", 1)
    ends = Here(link)
    yield ends
    await link.close()
    await ends.follower


@pytest.fixture
async def reader(tmp_path: Path) -> AsyncIterator[ProcessPeer]:
    peer = ProcessPeer("ucx://", "reader", 1, SEED, tmp_path / "reader.log")
    await peer.ready()
    yield peer
    await peer.close()


async def test_a_reader_that_was_frozen_until_the_memory_was_anothers_takes_nothing_of_it(here, reader):
    for number in range(5):
        owner = f"t{number}"
        landing, lent = await reader.open(owner, WINDOW), pieces(here.source, SIZES)
        await reader.freeze()
        with pytest.raises(DeadlineExceeded):
            async with here.sender(0.2).transfer(landing) as outgoing:
                await outgoing.send(lent, last=True)
        here.source.memory[:] = source_bytes(SEED + 1 + number)  # given up: the blocks are another prompt's
        await reader.thaw()
        # What it had begun to copy is not as it was sealed, or it hears first that nothing is to be taken.
        assert await reader.opened(owner) in (DataLoss.code, Cancelled.code)


def hide(link: Link) -> None:
    """Nobody finds the memory any more: as from another namespace."""
    assert isinstance(link, UcxLink)
    _, shared = link._neighbours._shared.popitem()
    shared.close()


async def test_what_a_reader_may_not_open_is_written_after_all(here, reader):
    hide(here.link)
    for owner in ("one", "two"):
        landing = await reader.open(owner, WINDOW)
        async with here.sender(10.0).transfer(landing) as outgoing:
            await outgoing.send(pieces(here.source, SIZES), last=True)
            assert outgoing._must_write
        assert await reader.opened(owner) == digest(source_bytes(SEED)[: sum(SIZES)])


async def test_a_last_chunk_that_is_written_is_not_announced_while_what_was_lent_may_have_to_be_written(here, reader):
    """It says that its writer is done: its landing could return to be another's."""
    hide(here.link)
    own, unconfirmed = source_region(here.link, SEED, lends=False), []
    both = [*pieces(here.source, SIZES[:20]), *pieces(own, SIZES)[20:]]
    landing = await reader.open("t", 4 * WINDOW)  # room for all at once
    async with here.sender(10.0).transfer(landing, sum(SIZES)) as outgoing:
        note = outgoing._note

        def noted(chunk, reply):
            unconfirmed.append((chunk.last, [each.lent for each in outgoing._unconfirmed if each.lent]))
            note(chunk, reply)

        outgoing._note = noted
        await outgoing.send(both, last=True)
    assert any(lent for _, lent in unconfirmed) and [lent for last, lent in unconfirmed if last] == [[]]
    assert await reader.opened("t") == digest(source_bytes(SEED)[: sum(SIZES)])
