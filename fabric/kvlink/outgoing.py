"""The sending half of pipelined transfers: chunks as far as credit goes, in fair turns. Knows links, no models."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fabric.errors import DeadlineExceeded, InvalidArgument, ServiceError, StaleTicket, from_detail
from fabric.kvlink import messages
from fabric.kvlink.credit import FairQueue, Flow, Run, SendRing, Turn
from fabric.kvlink.leftovers import to_its_end
from fabric.kvlink.link import Link, Notice, Region, Write
from fabric.kvlink.messages import Alive, Chunk, Credit, FromReceiver, GaveUp, Refusal, Trailing, Unreadable
from fabric.kvlink.pieces import NOTHING, Piece, Pieces, writes
from fabric.kvlink.plan import lay_out
from fabric.records import Landing, LinkAddress
from fabric.telemetry import logs
from fabric.wire import ErrorDetail

__all__ = ["Outgoing", "Piece", "Pieces", "SendLimits", "Sender"]

_log = logs.get("kvlink")
ResultT = TypeVar("ResultT")
# Takes what is left to do for a transfer, and runs it to its end.
Leave = Callable[[Coroutine[Any, Any, None]], None]
# Seconds without a word after which what was announced is announced again; doubled each time up to the most.
_ASK_AGAIN_S, _ASK_AGAIN_MOST_S = 0.25, 2.0


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
    async def transfer(
        self, landing: Landing, total_bytes: int | None = None, leave: Leave | None = None
    ) -> AsyncIterator[Outgoing]:
        """One transfer into `landing`, of `total_bytes` bytes where that is known: what fits whole needs no credit.

        At the end of the block, unless the last chunk was sent, the receiver is told that no more will be written, or
        that a write which was given up may still be on its way. The block waits for that, and for a write that is
        under way; given `leave`, neither it nor a `send` that is cancelled waits: what is left goes there, and until
        it ended nothing that was sent may change. It fails where a write may arrive even after that.

        Raises:
            InvalidArgument: a transfer into this landing is open.
        """
        if landing.id in self._open:
            raise InvalidArgument(f"a transfer into {landing.id} is open", field="landing")
        outgoing = self._open[landing.id] = Outgoing(self, landing, total_bytes, waits=leave is None)
        try:
            yield outgoing
        finally:
            if outgoing.finished:
                del self._open[landing.id]
            elif leave is None:
                await to_its_end(self._ended(outgoing, landing))
            else:
                leave(self._left(outgoing, landing))

    async def _ended(self, outgoing: Outgoing, landing: Landing) -> None:
        try:
            await outgoing.end()
        finally:
            del self._open[landing.id]

    async def _left(self, outgoing: Outgoing, landing: Landing) -> None:
        """As `_ended`. Raises DeadlineExceeded where a write that was given up may still arrive."""
        await self._ended(outgoing, landing)
        if outgoing.in_doubt:
            raise DeadlineExceeded(f"a write into {landing.id} was given up and may still arrive")

    async def give_up(self, landing: Landing) -> None:
        """Tells the receiver that nothing will be written into a landing for which no transfer was begun. One that is
        open, by another request with the same ticket, says itself how it ends."""
        if landing.id in self._open:
            return
        async with self.transfer(landing):
            pass

    def noticed(self, notice: Notice) -> bool:
        """Takes what a receiver says; False for another notice. A malformed one is logged and dropped."""
        if not messages.is_for_sender(notice.payload):
            return False
        try:
            message = messages.unpack(notice.payload)
            outgoing = self._open.get(message.transfer)
            if outgoing is not None and isinstance(message, FromReceiver):
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

    async def turn(self, flow: Flow, size: int) -> Callable[[], None]:
        """Waits until a chunk of `size` bytes may go. Returns what gives the turn back, to be called once.

        Raises:
            DeadlineExceeded: others did not finish in time.
        """
        turn = self._queue.join(flow, size)
        begun = self._begun[turn] = asyncio.get_running_loop().create_future()
        try:
            self._admit()
            if not begun.done():
                await _before(self.limits.timeout_s, begun, "no turn to send")
        except BaseException:
            self._leave(turn)
            raise
        return partial(self._leave, turn)

    def _leave(self, turn: Turn) -> None:
        del self._begun[turn]
        self._queue.leave(turn)
        self._admit()

    def _admit(self) -> None:
        for turn in self._queue.admit():
            if not self._begun[turn].done():
                self._begun[turn].set_result(None)


@dataclass(slots=True, eq=False)
class _Unconfirmed:
    """A chunk that its receiver did not say it took. `lent`: its bytes are not in the landing but where they are."""

    number: int
    run: Run
    last: bool
    pieces: Pieces
    lent: bytes = b""
    notice: bytes = b""


class Outgoing:
    """One transfer: `send` in the order of the bytes, by one task at a time."""

    def __init__(self, sender: Sender, landing: Landing, total_bytes: int | None, waits: bool = True) -> None:
        """waits: whether a `send` that is cancelled waits for the write that it began; `end` always does."""
        self._sender, self._landing, self._waits = sender, landing, waits
        self._writing: asyncio.Task[None] | None = None
        self._fits = total_bytes is not None and total_bytes <= landing.size
        self._ring, self._flow = SendRing(landing.size), Flow()
        self._answered = asyncio.Event()
        self._refused: ServiceError | None = None
        self._must_write = False  # the receiver cannot read this process's memory
        self._chunks = 0
        self._asked = False
        self._unconfirmed: deque[_Unconfirmed] = deque()
        self._ask_again_s = _ASK_AGAIN_S
        self._finished = False
        self.in_doubt = False  # whether a write was given up and may still arrive

    @property
    def refused(self) -> ServiceError | None:
        """What the receiver refused the transfer for, if it did: `send` of the last pieces raises it to nobody."""
        return self._refused

    @property
    def finished(self) -> bool:
        """Whether the receiver knows that no more will be written."""
        return self._finished

    async def send(self, pieces: Pieces | Sequence[Piece], *, last: bool = False) -> None:
        """Sends the pieces; returns when nobody needs them here any more. With `last` nothing may follow, and it
        returns when the receiver has said that everything is verified in its place, or that it is not: whoever waits
        for the bytes there is told the reason by the receiver itself.

        Raises:
            InvalidArgument: a piece is larger than the landing; nothing of it was written.
            DeadlineExceeded: no credit, no turn, no word or no end of a push in time.
            Unavailable: the peer is gone.
            ServiceError: what the receiver refused the transfer for, such as DataLoss, before the last piece was sent.
        """
        packed = pieces if isinstance(pieces, Pieces) else Pieces.pack(pieces)
        lends = any(self._lends(region) for region in packed.regions)
        for first, end in packed.spans(self._chunk_bytes(lends), lends) or ([(0, 0)] if last else []):
            await self._send_chunk(packed.cut(first, end), last and end == len(packed))
        await (self._taken() if last else self._lent_taken())
        if self._refused is not None and not last:
            raise self._refused
        self._finished = last and self._refused is None

    def told(self, notice: Notice, message: FromReceiver) -> None:
        """What the receiver says; others than the receiver are not listened to."""
        address = self._landing.address
        if (notice.peer, notice.epoch) != (address.peer, address.epoch):
            return
        match message:
            case Credit():
                self._credit(message)
            case Refusal():
                self._refused = from_detail(ErrorDetail(message.code, message.message))
            case Unreadable():
                self._must_write = True
        self._answered.set()

    async def alive(self) -> None:
        """Tells the receiver that this writer is there. Raises ServiceError where it cannot be told."""
        await self._push([], Alive(self._landing.id).pack())

    async def end(self) -> None:
        """Tells the receiver that no more will be written, unless it knows: once the write under way has ended. It says
        no more than is known. Cancelled, it gives that write up."""
        if self._finished:
            return
        self._finished = True
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        message = Trailing(self._landing.id) if self.in_doubt else GaveUp(self._landing.id)
        address, timeout_s = self._landing.address, self._sender.limits.timeout_s
        try:
            await self._sender.link.push(address, [], notify=message.pack(), timeout_s=timeout_s)
        except ServiceError as error:
            _log.info("receiver not told that the transfer ended", code=error.code)

    def _lends(self, region: Region) -> bool:
        return not self._must_write and self._sender.link.lends(self._landing.address, region)

    def _credit(self, credit: Credit) -> None:
        if credit.chunks > self._chunks:
            raise InvalidArgument(f"{credit.chunks} chunks taken of {self._chunks}", field="credit")
        self._ring.credit(credit.position)
        while self._unconfirmed and self._unconfirmed[0].number < credit.chunks:
            self._ask_again_s = _ASK_AGAIN_S
            if self._unconfirmed.popleft().lent:
                self._sender.link.was_read(self._landing.address)

    def _chunk_bytes(self, lends: bool) -> int:
        """Half a landing at most, unless all fits: one half is taken out while the other is filled. What is lent fills
        nothing: the fewer words about it the better, since each finds its receiver's caches full of what it copied."""
        limits, size = self._sender.limits, self._landing.size
        whole = self._fits and self._ring.written < size
        most = limits.in_flight_bytes if lends else min(limits.chunk_bytes, limits.in_flight_bytes)
        return min(most, size if whole or lends else max(1, size // 2))

    async def _send_chunk(self, pieces: Pieces, last: bool) -> None:
        region = pieces.regions[int(pieces.of[0])] if len(pieces) else None
        if last and (region is None or not self._lends(region)):
            await self._lent_taken()  # this notice says that no more is written: what was lent might have to be
        run = await self._place(pieces.nbytes)
        chunk = _Unconfirmed(self._chunks, run, last, pieces)
        self._chunks += 1
        self._unconfirmed.append(chunk)
        if region is not None and self._lends(region):
            await self._lend(chunk, region)
        else:
            await self._write_chunk(chunk)

    async def _lend(self, chunk: _Unconfirmed, region: Region) -> None:
        """Tells where the bytes are: the receiver copies them from there."""
        chunk.lent = region.token.shared
        chunk.pieces.extents.table["offset"] = chunk.pieces.starts
        self._note(chunk, self._reply(asks=True))
        if not self._sender.link.push_at_once(self._landing.address, [], notify=chunk.notice):
            await self._push([], chunk.notice)

    async def _write_chunk(self, chunk: _Unconfirmed) -> None:
        """At once where the link can and nobody else waits for a turn, else in a turn of its own."""
        sizes, total = chunk.pieces.sizes, chunk.run.size
        offsets = chunk.run.offset + lay_out(sizes)
        chunk.lent = b""
        chunk.pieces.extents.table["offset"] = offsets
        self._note(chunk, self._reply(asks=self._is_enough(chunk.run) or not total))
        found = writes(self._landing, chunk.pieces, offsets, sizes)
        if self._sender.push_at_once(self._flow, total, self._landing.address, found, chunk.notice):
            await asyncio.sleep(0)  # many in a row must not keep the loop from others
        elif not total:
            await self._push([], chunk.notice)
        else:
            await self._push(found, chunk.notice, await self._sender.turn(self._flow, total))

    def _note(self, chunk: _Unconfirmed, reply: LinkAddress | None) -> None:
        """The chunk's announcement; the last one can be answered by a receiver that has forgotten the transfer."""
        reply = self._sender.link.address if chunk.last else reply
        message = Chunk(
            self._landing.id, chunk.number, chunk.run, chunk.last, chunk.pieces.extents, reply, lent=chunk.lent
        )
        chunk.notice = message.pack()

    def _is_enough(self, run: Run) -> bool:
        """Whether credit will be needed: half the landing is full, or all of it by a transfer that fits whole."""
        return run.end > (self._landing.size if self._fits else self._landing.size // 2)

    def _reply(self, asks: bool) -> LinkAddress | None:
        """Where credit goes, told once."""
        if self._asked or not asks:
            return None
        self._asked = True
        return self._sender.link.address

    async def _place(self, size: int) -> Run:
        if self._refused is None and (run := self._ring.place(size)) is not None:
            return run
        return await self._in_time(self._credit_for(size), "no credit")

    async def _in_time(self, work: Coroutine[Any, Any, ResultT], what: str) -> ResultT:
        peer, timeout_s = self._landing.address.peer, self._sender.limits.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except TimeoutError as error:
            raise DeadlineExceeded(f"{what} from {peer} after {timeout_s:.3g} s") from error

    async def _credit_for(self, size: int) -> Run:
        while self._refused is None:
            run = self._ring.place(size)
            if run is not None:
                return run
            if self._asked:
                await self._hear()
            else:  # the piece is so large that it finds no place although half the landing is free
                await self._send_chunk(NOTHING.cut(0, 0), last=False)
        raise self._refused

    async def _lent_taken(self) -> None:
        if any(chunk.lent for chunk in self._unconfirmed):
            await self._taken()

    async def _taken(self) -> None:
        await self._in_time(self._all_taken(), "no word that everything was taken")

    async def _all_taken(self) -> None:
        while self._unconfirmed and self._refused is None:
            await self._hear()

    async def _hear(self) -> None:
        """The receiver's next word. One that says nothing new, or none for a while, means that notices were lost."""
        before = len(self._unconfirmed), self._ring.in_flight
        self._answered.clear()
        with self._sender.link.expecting(), suppress(TimeoutError):
            async with asyncio.timeout(self._ask_again_s):
                await self._answered.wait()
        if self._refused is not None:
            return
        if self._must_write and any(chunk.lent for chunk in self._unconfirmed):
            for chunk in [each for each in self._unconfirmed if each.lent]:
                await self._write_chunk(chunk)
        elif before == (len(self._unconfirmed), self._ring.in_flight):
            self._ask_again_s = min(2 * self._ask_again_s, _ASK_AGAIN_MOST_S)
            await self._announce_again()

    async def _announce_again(self) -> None:
        """Receivers take a chunk once, however often it is announced."""
        _log.info("chunks announced again", peer=self._landing.address.peer, chunks=len(self._unconfirmed))
        link, timeout_s = self._sender.link, self._sender.limits.timeout_s
        for chunk in list(self._unconfirmed):
            await link.push(self._landing.address, [], notify=chunk.notice, timeout_s=timeout_s)

    async def _push(self, found: Sequence[Write], notify: bytes, then: Callable[[], None] | None = None) -> None:
        """Pushes to its end even when the caller is cancelled: the source must not change meanwhile. `then`: called at
        that end."""
        self._writing = asyncio.ensure_future(self._write(found, notify))
        if then is not None:
            self._writing.add_done_callback(lambda _: then())
        await (to_its_end(self._writing) if self._waits else asyncio.shield(self._writing))

    async def _write(self, found: Sequence[Write], notify: bytes) -> None:
        link, timeout_s = self._sender.link, self._sender.limits.timeout_s
        try:
            await link.push(self._landing.address, found, notify=notify, timeout_s=timeout_s)
        except (InvalidArgument, StaleTicket):  # refused whole: nothing of it was written, nor will be
            raise
        except BaseException:
            self.in_doubt = self.in_doubt or bool(found)
            raise


async def _before(timeout_s: float, event: Awaitable[object], what: str) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event
    except TimeoutError as error:
        raise DeadlineExceeded(f"{what} after {timeout_s:.3g} s") from error
