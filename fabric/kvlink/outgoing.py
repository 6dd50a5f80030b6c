"""The sending half of pipelined transfers: chunks as far as credit goes, in fair turns. Knows links, no models."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric.errors import DeadlineExceeded, InvalidArgument, ServiceError, from_detail
from fabric.kvlink import messages
from fabric.kvlink.credit import FairQueue, Flow, Run, SendRing, Turn, cut
from fabric.kvlink.extents import Extents
from fabric.kvlink.link import Link, Notice, Offsets, Region, Write
from fabric.kvlink.messages import Alive, Chunk, Credit, GaveUp, Refusal, Trailing
from fabric.kvlink.plan import lay_out, write_to
from fabric.records import Landing, LinkAddress
from fabric.telemetry import logs
from fabric.wire import ErrorDetail

_log = logs.get("kvlink")
# Seconds without a word on credit after which what was announced is announced again; receivers repeat theirs sooner.
_ASK_AGAIN_S = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One extent as it lies in this process: `size` bytes from `start` of `source`, sealed with their digest.

    The bytes must stay as they are until the `send` that takes them has returned.
    """

    group: str
    block: int
    valid_entries: int
    source: Region
    start: int
    size: int
    digest: int


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Many pieces in order, as arrays: piece i is `extents.table[i]`, at `starts[i]` of `regions[of[i]]`, int64 [n]."""

    extents: Extents
    regions: tuple[Region, ...]
    of: Offsets
    starts: Offsets

    @staticmethod
    def pack(pieces: Sequence[Piece]) -> Pieces:
        numbers: dict[int, int] = {}
        rows = [(p.group, p.block, p.valid_entries, 0, p.size, p.digest) for p in pieces]
        of = [numbers.setdefault(id(p.source), len(numbers)) for p in pieces]
        regions = {id(p.source): p.source for p in pieces}
        starts = np.array([p.start for p in pieces], np.int64)
        return Pieces(Extents.of(rows), tuple(regions[key] for key in numbers), np.array(of, np.int64), starts)

    def cut(self, first: int, end: int) -> Pieces:
        table = self.extents.table[first:end].copy()
        return Pieces(Extents(self.extents.groups, table), self.regions, self.of[first:end], self.starts[first:end])

    @property
    def sizes(self) -> Offsets:
        return self.extents.table["size"].astype(np.int64)

    def __len__(self) -> int:
        return len(self.starts)


_NOTHING = Pieces.pack(())


@dataclass(frozen=True, slots=True)
class SendLimits:
    """chunk_bytes: of one push. in_flight_bytes: of all pushes of the link at a time. timeout_s: of every single wait,
    for credit, for a turn and for a push."""

    chunk_bytes: int = 4 << 20
    in_flight_bytes: int = 16 << 20
    timeout_s: float = 30.0


class Sender:
    """All transfers that leave by one link. Feed it the link's notices; it runs in the link's event loop."""

    def __init__(self, link: Link, limits: SendLimits) -> None:
        self.link, self.limits = link, limits
        self._queue = FairQueue(limits.in_flight_bytes)
        self._begun: dict[Turn, asyncio.Future[None]] = {}
        self._open: dict[str, Outgoing] = {}

    @asynccontextmanager
    async def transfer(self, landing: Landing, total_bytes: int | None = None) -> AsyncIterator[Outgoing]:
        """One transfer into `landing`, of `total_bytes` bytes where that is known: what fits whole needs no credit.

        At the end of the block, unless the last chunk was sent, the receiver is told that no more will be written, or
        that a write which was given up may still be on its way.

        Raises:
            InvalidArgument: a transfer into this landing is open.
        """
        if landing.id in self._open:
            raise InvalidArgument(f"a transfer into {landing.id} is open", field="landing")
        outgoing = self._open[landing.id] = Outgoing(self, landing, total_bytes)
        try:
            yield outgoing
        finally:
            del self._open[landing.id]
            await _to_its_end(outgoing.end())

    async def give_up(self, landing: Landing) -> None:
        """Tells the receiver that nothing will be written into a landing for which no transfer was begun."""
        async with self.transfer(landing):
            pass

    def noticed(self, notice: Notice) -> bool:
        """Takes a credit or a refusal; False for a notice that is neither. A malformed one is logged and dropped."""
        if not messages.is_for_sender(notice.payload):
            return False
        try:
            message = messages.unpack(notice.payload)
            outgoing = self._open.get(message.transfer)
            if outgoing is not None and isinstance(message, Credit | Refusal):
                outgoing.told(notice, message)
        except InvalidArgument as error:
            _log.warning("notice dropped", peer=notice.peer, reason=error.message)
        return True

    def push_at_once(self, flow: Flow, size: int, address: LinkAddress, writes: Sequence[Write], notify: bytes) -> bool:
        """Sends a chunk if that needs no waiting, of the link or for a turn; whether it did."""
        done = self._queue.has_room(size) and self.link.push_at_once(address, writes, notify=notify)
        if done:
            self._queue.passed(flow, size)
        return done

    @asynccontextmanager
    async def turn(self, flow: Flow, size: int) -> AsyncIterator[None]:
        """Waits until a chunk of `size` bytes may go; what it holds is given back at the end, whatever that is.

        Raises:
            DeadlineExceeded: others did not finish in time.
        """
        turn = self._queue.join(flow, size)
        begun = self._begun[turn] = asyncio.get_running_loop().create_future()
        try:
            self._admit()
            if not begun.done():
                await _before(self.limits.timeout_s, begun, "no turn to send")
            yield
        finally:
            del self._begun[turn]
            self._queue.leave(turn)
            self._admit()

    def _admit(self) -> None:
        for turn in self._queue.admit():
            if not self._begun[turn].done():
                self._begun[turn].set_result(None)


class Outgoing:
    """One transfer: `send` in the order of the bytes, by one task at a time."""

    def __init__(self, sender: Sender, landing: Landing, total_bytes: int | None) -> None:
        self._sender, self._landing = sender, landing
        self._fits = total_bytes is not None and total_bytes <= landing.size
        self._ring, self._flow = SendRing(landing.size), Flow()
        self._credited = asyncio.Event()
        self._refused: ServiceError | None = None
        self._chunks = 0
        self._asked = False
        self._announced: deque[tuple[int, bytes]] = deque()  # (end, notice) of chunks without credit
        self._finished = False
        self._in_doubt = False

    async def send(self, pieces: Pieces | Sequence[Piece], *, last: bool = False) -> None:
        """Writes the pieces; returns when all of them are in the landing or beyond. With `last` nothing may follow.

        Raises:
            InvalidArgument: a piece is larger than the landing; nothing of it was written.
            DeadlineExceeded: no credit, no turn or no end of a push in time.
            Unavailable: the peer is gone.
            ServiceError: what the receiver refused the transfer for, such as DataLoss.
        """
        packed = pieces if isinstance(pieces, Pieces) else Pieces.pack(pieces)
        for first, end in cut(packed.sizes, self._chunk_bytes()) or ([(0, 0)] if last else []):
            await self._send_chunk(packed.cut(first, end), last and end == len(packed))
        self._finished = last

    def told(self, notice: Notice, message: Credit | Refusal) -> None:
        """What the receiver says; others than the receiver are not listened to."""
        address = self._landing.address
        if (notice.peer, notice.epoch) != (address.peer, address.epoch):
            return
        if isinstance(message, Credit):
            self._ring.credit(message.position)
            while self._announced and self._announced[0][0] <= message.position:
                self._announced.popleft()
        else:
            self._refused = from_detail(ErrorDetail(message.code, message.message))
        self._credited.set()

    async def alive(self) -> None:
        """Tells the receiver that this writer is there. Raises ServiceError where it cannot be told."""
        await self._push([], Alive(self._landing.id).pack())

    async def end(self) -> None:
        """Tells the receiver that no more will be written, unless it knows. It says no more than is known."""
        if self._finished:
            return
        self._finished = True
        message = Trailing(self._landing.id) if self._in_doubt else GaveUp(self._landing.id)
        address, timeout_s = self._landing.address, self._sender.limits.timeout_s
        try:
            await self._sender.link.push(address, [], notify=message.pack(), timeout_s=timeout_s)
        except ServiceError as error:
            _log.info("receiver not told that the transfer ended", code=error.code)

    def _chunk_bytes(self) -> int:
        """Half a landing at most, unless all fits: one half is taken out while the other is filled."""
        limits, size = self._sender.limits, self._landing.size
        whole = self._fits and self._ring.written < size
        return min(limits.chunk_bytes, limits.in_flight_bytes, size if whole else max(1, size // 2))

    async def _send_chunk(self, pieces: Pieces, last: bool) -> None:
        sizes = pieces.sizes
        total = int(sizes.sum())
        run = await self._place(total)
        offsets = run.offset + lay_out(sizes)
        pieces.extents.table["offset"] = offsets
        reply = self._reply(run, asks=not total and not last)
        notify = Chunk(self._landing.id, self._chunks, run, last, pieces.extents, reply).pack()
        await self._write_chunk(_writes(self._landing, pieces, offsets, sizes), total, notify)
        self._announced.append((run.end, notify))
        self._chunks += 1

    async def _write_chunk(self, writes: Sequence[Write], total: int, notify: bytes) -> None:
        """At once where the link can and nobody else waits for a turn, else in a turn of its own."""
        if self._sender.push_at_once(self._flow, total, self._landing.address, writes, notify):
            await asyncio.sleep(0)  # many in a row must not keep the loop from others
        elif not total:
            await self._push([], notify)
        else:
            async with self._sender.turn(self._flow, total):
                await self._push(writes, notify)

    def _reply(self, run: Run, asks: bool) -> LinkAddress | None:
        """Where credit goes, told once: when half the landing is full, or all of it by a transfer that fits whole."""
        enough = self._landing.size if self._fits else self._landing.size // 2
        if self._asked or not (asks or run.end > enough):
            return None
        self._asked = True
        return self._sender.link.address

    async def _place(self, size: int) -> Run:
        if self._refused is None and (run := self._ring.place(size)) is not None:
            return run
        peer, timeout_s = self._landing.address.peer, self._sender.limits.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._credit_for(size)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no credit from {peer} after {timeout_s:.3g} s") from error

    async def _credit_for(self, size: int) -> Run:
        while self._refused is None:
            run = self._ring.place(size)
            if run is not None:
                return run
            if not self._asked:  # the piece is so large that it finds no place although half the landing is free
                await self._send_chunk(_NOTHING.cut(0, 0), last=False)
                continue
            before = self._ring.in_flight
            self._credited.clear()
            with self._sender.link.expecting():
                await self._credit_said()
            if self._ring.in_flight == before:  # said again, or not at all: what was announced since may be lost
                await self._announce_again()
        raise self._refused

    async def _credit_said(self) -> None:
        """Returns at the next credit or refusal, or when it is time to ask again: that notice may be lost as well."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_ASK_AGAIN_S):
                await self._credited.wait()

    async def _announce_again(self) -> None:
        """Receivers take a chunk once, however often it is announced."""
        _log.info("chunks announced again", peer=self._landing.address.peer, chunks=len(self._announced))
        link, timeout_s = self._sender.link, self._sender.limits.timeout_s
        for _, notify in list(self._announced):
            await link.push(self._landing.address, [], notify=notify, timeout_s=timeout_s)

    async def _push(self, writes: Sequence[Write], notify: bytes) -> None:
        """Pushes to its end even when the caller is cancelled: the source must not change meanwhile."""
        await _to_its_end(self._write(writes, notify))

    async def _write(self, writes: Sequence[Write], notify: bytes) -> None:
        link, timeout_s = self._sender.link, self._sender.limits.timeout_s
        try:
            await link.push(self._landing.address, writes, notify=notify, timeout_s=timeout_s)
        except BaseException:
            self._in_doubt = self._in_doubt or bool(writes)
            raise


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`, which has a deadline, to its end even when the caller is cancelled, be it more than once."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        await task
        return
    if not task.cancelled():
        task.exception()  # retrieved: the caller is gone, nobody else will
    raise cancelled


async def _before(timeout_s: float, event: Awaitable[object], what: str) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event
    except TimeoutError as error:
        raise DeadlineExceeded(f"{what} after {timeout_s:.3g} s") from error


def _writes(landing: Landing, pieces: Pieces, offsets: Offsets, sizes: Offsets) -> list[Write]:
    """One write for every source region, its pieces in order."""
    if len(pieces.regions) == 1:
        return [write_to(landing, pieces.regions[0], pieces.starts, offsets, sizes)]
    found = []
    for number, region in enumerate(pieces.regions):
        own = pieces.of == number
        if own.any():
            found.append(write_to(landing, region, pieces.starts[own], offsets[own], sizes[own]))
    return found
