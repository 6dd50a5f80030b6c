"""How much one announcement names of what a receiver reads where it lies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fabric.kvlink import Token, Write, messages
from fabric.kvlink.link import Notice, Region
from fabric.kvlink.messages import Chunk, Credit
from fabric.kvlink.outgoing import Sender, SendLimits
from fabric.records import Landing, LinkAddress
from tests.support.link_peer import pieces, source_bytes

RECEIVER = LinkAddress("x://", "d", 1)
LANDING = Landing("t", RECEIVER, Token(0, 0, 4096).pack(), 0, 4096)


class Recorder:
    """A link whose peers may read its memory, or may not; it keeps what was said."""

    address = LinkAddress("x://", "p", 1)

    def __init__(self, may_lend: bool) -> None:
        self._may_lend = may_lend
        self.said: list[object] = []
        self.news = asyncio.Event()

    def lends(self, address: LinkAddress, region: Region) -> bool:
        return self._may_lend

    def was_read(self, address: LinkAddress) -> None: ...

    def push_at_once(self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes) -> bool:
        self.said.append(messages.unpack(notify))
        self.news.set()
        return True

    @contextmanager
    def expecting(self) -> Iterator[None]:
        yield


async def sizes_are(wanted: list[int], may_lend: bool) -> None:
    """Sends four landings' worth, each chunk credited as soon as it came; compares the bytes of each chunk."""
    link, source = Recorder(may_lend), source_bytes(1)
    sender = Sender(link, SendLimits())  # type: ignore[arg-type]  # the part of a link that it uses
    region = Region(Token(0, source.ctypes.data, source.nbytes, b"shared"), source)
    async with sender.transfer(LANDING) as outgoing:
        sending = asyncio.create_task(outgoing.send(pieces(region, [1024] * 16), last=True))
        for taken in range(1, len(wanted) + 1):
            while len(link.said) < taken:
                link.news.clear()
                await asyncio.wait_for(link.news.wait(), 10.0)
            chunk = link.said[taken - 1]
            assert isinstance(chunk, Chunk)
            credit = Credit("t", chunk.run.end, taken)
            sender.noticed(Notice(RECEIVER.peer, RECEIVER.epoch, credit.pack()))
        await sending
    chunks = [said for said in link.said if isinstance(said, Chunk)]
    assert [chunk.run.size for chunk in chunks] == wanted
    assert link.said == chunks  # the receiver knows that it has all: nothing is said at the end


async def test_what_is_lent_is_announced_a_whole_landing_at_a_time() -> None:
    await sizes_are([4096] * 4, may_lend=True)


async def test_what_is_written_is_announced_half_a_landing_at_a_time() -> None:
    await sizes_are([2048] * 8, may_lend=False)
