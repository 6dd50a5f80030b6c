"""The KV link inside one process: the fake of the contract tests and of single-process stacks. Knows peers by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fabric.errors import DeadlineExceeded, Internal, StaleTicket, Unavailable
from fabric.kvlink import plan
from fabric.kvlink.inbox import Inbox
from fabric.kvlink.link import Bytes, Notice, Region, Token, Write, as_bytes, plain_memory
from fabric.kvlink.peers import PeerBook
from fabric.kvlink.plan import Copies
from fabric.records import LinkAddress

_links: dict[str, InprocLink] = {}


class InprocLink:
    """Copies memory. `kill` and `freeze` make it fail as a process would, for tests of everything above."""

    def __init__(self, name: str, epoch: int) -> None:
        self.address = LinkAddress("inproc://", name, epoch)
        self.lane = "inproc"
        self._regions: dict[int, Region] = {}
        self._peers = PeerBook()
        self._inbox = Inbox()
        self._running = asyncio.Event()
        self._running.set()
        self._closed = False
        _links[name] = self

    def allocate(self, nbytes: int, touched: bool = True) -> Bytes:
        return plain_memory(nbytes, touched)

    def register(self, buffer: Any) -> Region:
        memory = as_bytes(buffer)
        region = Region(Token(len(self._regions), memory.ctypes.data, memory.nbytes), memory)
        self._regions[region.token.number] = region
        return region

    def lends(self, address: LinkAddress, region: Region) -> bool:
        return False

    def was_read(self, address: LinkAddress) -> None:
        raise Internal(f"{address.peer} cannot have read what this link never lent")

    def view(self, peer: str, epoch: int, shared: bytes) -> Bytes | None:
        return None

    def push_at_once(self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes) -> bool:
        return False

    async def push(
        self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes = b"", timeout_s: float
    ) -> None:
        if self._closed:
            raise Unavailable("this link is closed")
        self._peers.admit(address)
        planned = [plan.copies(write) for write in writes]
        try:
            async with asyncio.timeout(timeout_s):
                await self._running.wait()
                peer = _find(address)
                for copies in planned:
                    peer._receive(copies)
                await peer._running.wait()  # a frozen peer takes one-sided bytes but answers nothing
                if notify:
                    await _find(address)._inbox.put(Notice(self.address.peer, self.address.epoch, notify))
        except TimeoutError as error:
            raise DeadlineExceeded(f"push to {address.peer} not done after {timeout_s:.3g} s") from error

    @contextmanager
    def expecting(self) -> Iterator[None]:
        yield

    def notices(self) -> AsyncIterator[Notice]:
        return aiter(self._inbox)

    async def close(self) -> None:
        self._closed = True
        if _links.get(self.address.peer) is self:
            del _links[self.address.peer]
        self._inbox.close()

    def freeze(self) -> None:
        """Stops answering and sending, as SIGSTOP does; memory stays writable."""
        self._running.clear()

    def thaw(self) -> None:
        self._running.set()

    def _receive(self, copies: Copies) -> None:
        memory = self._regions[copies.target.number].memory
        for source, target, size in copies.table.T.tolist():
            memory[target : target + size] = copies.source.memory[source : source + size]


def _find(address: LinkAddress) -> InprocLink:
    link = _links.get(address.peer)
    if link is None:
        raise Unavailable(f"{address.peer} is not in this process")
    if link.address.epoch != address.epoch:
        raise StaleTicket(f"{address.peer} has epoch {link.address.epoch}, not {address.epoch}", field="address")
    return link
