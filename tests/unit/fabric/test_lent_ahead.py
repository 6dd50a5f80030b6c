"""What a receiver reads where it lies is announced ahead of credit, up to a bound, and may be left to be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial

import pytest

from fabric.errors import DataLoss
from fabric.kvlink import Token, Write, messages
from fabric.kvlink.leftovers import Leftovers
from fabric.kvlink.link import Notice, Region
from fabric.kvlink.messages import Chunk, Credit, GaveUp, Refusal, Unreadable
from fabric.kvlink.outgoing import Outgoing, Pieces, Sender, SendLimits
from fabric.records import Landing, LinkAddress
from tests.support.link_peer import pieces, source_bytes

RECEIVER = LinkAddress("x://", "d", 1)
RING = 4096
LANDING = Landing("t", RECEIVER, Token(0, 0, RING).pack(), 0, RING, lent_bytes=4 * RING)


class Recorder:
    """A link whose peers may read its memory; it keeps what was said and how many bytes were written."""

    address = LinkAddress("x://", "p", 1)

    def __init__(self) -> None:
        self.said: list[object] = []
        self.written: list[int] = []
        self.news = asyncio.Event()

    def lends(self, address: LinkAddress, region: Region) -> bool:
        return True

    def was_read(self, address: LinkAddress) -> None: ...

    def push_at_once(self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes) -> bool:
        self.written += [write.nbytes for write in writes]
        self.said.append(messages.unpack(notify))
        self.news.set()
        return True

    async def push(self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes, timeout_s: float) -> None:
        self.push_at_once(address, writes, notify=notify)

    @contextmanager
    def expecting(self) -> Iterator[None]:
        yield

    @property
    def chunks(self) -> list[Chunk]:
        return [said for said in self.said if isinstance(said, Chunk)]

    async def until(self, is_there: Callable[[], bool]) -> None:
        async with asyncio.timeout(10.0):
            while not is_there():
                self.news.clear()
                await self.news.wait()


class Reader:
    """A sender, and what its receiver says to it."""

    def __init__(self) -> None:
        self.link, self.leftovers, source = Recorder(), Leftovers(10.0), source_bytes(1)
        self.sender = Sender(self.link, SendLimits())  # type: ignore[arg-type]  # the part of a link that it uses
        self.region = Region(Token(0, source.ctypes.data, source.nbytes, b"shared"), source)

    def says(self, message: Credit | Refusal | Unreadable) -> None:
        self.sender.noticed(Notice(RECEIVER.peer, RECEIVER.epoch, message.pack()))

    def pieces(self, count: int) -> Pieces:
        return Pieces.pack(pieces(self.region, [1024] * count))

    @asynccontextmanager
    async def transfer(self, name: str, landing: Landing = LANDING) -> AsyncIterator[Outgoing]:
        leave = partial(self.leftovers.keep, name)
        async with self.sender.transfer(replace(landing, id=name), leave=leave) as outgoing:
            yield outgoing

    async def read_once(self) -> None:
        """From then on it is known that this receiver reads."""
        async with self.transfer("once") as outgoing:
            sending = asyncio.create_task(outgoing.send(self.pieces(1), last=True))
            await self.link.until(lambda: bool(self.link.chunks))
            self.says(Credit("once", 0, 1))
            await sending
        self.link.said.clear()


@pytest.fixture
async def reader() -> Reader:
    return Reader()


async def test_four_landings_are_announced_before_any_credit_which_is_asked_for_once(reader: Reader) -> None:
    async with reader.transfer("t") as outgoing:
        sending = asyncio.create_task(outgoing.send(reader.pieces(16), last=True))
        await reader.link.until(lambda: len(reader.link.chunks) == 4)
        reader.says(Credit("t", 0, 4))
        await sending
    chunks = reader.link.chunks
    assert [(chunk.run.size, chunk.nbytes, chunk.ahead) for chunk in chunks] == [(0, RING, True)] * 4
    # From half of what may be announced on: else a receiver would not know whom to tell that there is room.
    assert [chunk.reply is not None for chunk in chunks] == [False, False, True, True]
    assert reader.link.said == chunks and not reader.link.written


async def test_no_more_is_announced_than_the_receiver_grants_until_some_was_taken(reader: Reader) -> None:
    async with reader.transfer("t") as outgoing:
        sending = asyncio.create_task(outgoing.send(reader.pieces(24), last=True))
        await reader.link.until(lambda: len(reader.link.chunks) == 4)
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(reader.link.chunks) == 4
        reader.says(Credit("t", 0, 1))
        await reader.link.until(lambda: len(reader.link.chunks) == 5)
        reader.says(Credit("t", 0, 3))
        await reader.link.until(lambda: len(reader.link.chunks) == 6)
        reader.says(Credit("t", 0, 6))
        await sending


async def test_a_receiver_that_grants_nothing_ahead_has_a_place_for_every_chunk(reader: Reader) -> None:
    async with reader.transfer("t", replace(LANDING, lent_bytes=0)) as outgoing:
        sending = asyncio.create_task(outgoing.send(reader.pieces(8), last=True))
        await reader.link.until(lambda: len(reader.link.chunks) == 1)
        reader.says(Credit("t", RING, 1))
        await reader.link.until(lambda: len(reader.link.chunks) == 2)
        reader.says(Credit("t", 2 * RING, 2))
        await sending
    assert [chunk.run.size for chunk in reader.link.chunks] == [RING, RING]


async def test_what_cannot_be_read_is_written_in_order_as_far_as_there_is_room(reader: Reader) -> None:
    """In chunks that fit the landing: what was lent as one needed no place there."""
    link, half = reader.link, RING // 2
    async with reader.transfer("t") as outgoing:
        sending = asyncio.create_task(outgoing.send(reader.pieces(12), last=True))
        await link.until(lambda: len(link.chunks) == 3)
        reader.says(Credit("t", 0, 1))  # the first was read: the rest cannot be any more
        reader.says(Unreadable("t"))
        await link.until(lambda: len(link.chunks) == 5)
        assert link.written == [half, half], "as much as there is room for"
        reader.says(Credit("t", half, 2))
        await link.until(lambda: len(link.chunks) == 6)
        reader.says(Credit("t", 2 * half, 3))
        await link.until(lambda: len(link.chunks) == 7)
        reader.says(Credit("t", 4 * half, 5))
        await sending
    written = link.chunks[3:]
    assert [(chunk.number, chunk.lent, chunk.run.start, chunk.run.size, chunk.last) for chunk in written] == [
        (1 + index, b"", index * half, half, index == 3) for index in range(4)
    ]
    blocks = [row[1] for chunk in written for row in chunk.extents.rows()]
    assert blocks == list(range(4, 12)) and sum(link.written) == 8 * 1024


async def test_what_is_begun_waits_for_no_word_and_is_taken_before_the_next_send_returns(reader: Reader) -> None:
    async with reader.transfer("t") as outgoing:
        await outgoing.begin(reader.pieces(2))
        assert [chunk.reply for chunk in reader.link.chunks] == [None]
        sending = asyncio.create_task(outgoing.send(Pieces.pack(()), last=True))
        await reader.link.until(lambda: len(reader.link.chunks) == 2)
        again = reader.link.chunks[1]
        assert again.number == 0 and again.reply is not None, "it is asked what became of the first"
        reader.says(Credit("t", 0, 1))
        await reader.link.until(lambda: len(reader.link.chunks) == 3)
        assert not sending.done()
        reader.says(Credit("t", 0, 2))
        await sending


async def test_a_send_returns_early_only_for_a_receiver_that_has_read_before(reader: Reader) -> None:
    async with reader.transfer("t") as outgoing:
        sending = asyncio.create_task(outgoing.send(reader.pieces(1), last=True, early=True))
        await reader.link.until(lambda: len(reader.link.chunks) == 1)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not sending.done() and not outgoing.left_early
        reader.says(Credit("t", 0, 1))
        await sending
    assert not reader.leftovers.pending


async def test_what_a_send_left_early_is_over_when_it_was_taken(reader: Reader) -> None:
    await reader.read_once()
    async with reader.transfer("t") as outgoing:
        await outgoing.send(reader.pieces(12), last=True, early=True)
    assert outgoing.left_early and reader.leftovers.pending == 1
    await asyncio.sleep(0)
    reader.says(Credit("t", 0, 3))
    assert await asyncio.wait_for(reader.leftovers.over("t"), 10.0)
    assert reader.link.said == reader.link.chunks, "nothing is left to be said"


async def test_what_a_send_left_early_and_is_refused_fails_what_is_left(reader: Reader) -> None:
    await reader.read_once()
    async with reader.transfer("t") as outgoing:
        await outgoing.send(reader.pieces(1), last=True, early=True)
    reader.says(Refusal("t", DataLoss.code, "not as it was sealed"))
    assert not await asyncio.wait_for(reader.leftovers.over("t"), 10.0)
    assert isinstance(outgoing.refused, DataLoss) and isinstance(reader.link.said[-1], GaveUp)


async def test_after_an_early_return_nothing_is_written_and_the_receiver_is_not_believed_again(reader: Reader) -> None:
    await reader.read_once()
    async with reader.transfer("t") as outgoing:
        await outgoing.send(reader.pieces(1), last=True, early=True)
    reader.says(Unreadable("t"))
    assert not await asyncio.wait_for(reader.leftovers.over("t"), 10.0)
    assert isinstance(reader.link.said[-1], GaveUp) and not reader.link.written
    async with reader.transfer("next") as outgoing:
        sending = asyncio.create_task(outgoing.send(reader.pieces(1), last=True, early=True))
        await reader.link.until(lambda: reader.link.chunks[-1].transfer == "next")
        reader.says(Unreadable("next"))
        await reader.link.until(lambda: bool(reader.link.written))
        reader.says(Credit("next", 1024, 1))
        await sending


async def test_a_receiver_that_stays_silent_after_an_early_return_keeps_the_pieces_no_longer_than_one_wait(
    reader: Reader,
) -> None:
    await reader.read_once()
    reader.sender._use = replace(reader.sender._use, limits=SendLimits(timeout_s=0.05))
    async with reader.transfer("t") as outgoing:
        await outgoing.send(reader.pieces(1), last=True, early=True)
    await asyncio.wait_for(reader.leftovers.over("t"), 10.0)
    assert isinstance(reader.link.said[-1], GaveUp)
