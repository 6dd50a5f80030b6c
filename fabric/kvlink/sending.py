"""One pipelined transfer as its sender sees it: chunks, written or lent, as far as credit goes. Knows no models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from fabric.errors import DeadlineExceeded, InvalidArgument, ServiceError, StaleTicket, Unavailable, from_detail
from fabric.kvlink.credit import Flow, Run, SendRing
from fabric.kvlink.leftovers import to_its_end
from fabric.kvlink.link import Link, Notice, Region, Write
from fabric.kvlink.messages import Alive, Chunk, Credit, FromReceiver, GaveUp, Refusal, Trailing, Unreadable
from fabric.kvlink.pieces import NOTHING, Piece, Pieces, writes
from fabric.kvlink.plan import lay_out
from fabric.kvlink.readers import Readers
from fabric.kvlink.turns import SendLimits, Turns
from fabric.kvlink.unconfirmed import Announced, Unconfirmed
from fabric.records import Landing, LinkAddress
from fabric.telemetry import logs
from fabric.wire import ErrorDetail

_log = logs.get("kvlink")
ResultT = TypeVar("ResultT")
# Seconds without a word after which what was announced is announced again; doubled each time up to the most.
_ASK_AGAIN_S, _ASK_AGAIN_MOST_S = 0.25, 2.0
# Of what may be lent ahead, one chunk: its receiver copies it in parts, and each word costs as much as a megabyte.
_LENT_SHARE = 4


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What all transfers that leave by one link share."""

    link: Link
    limits: SendLimits
    turns: Turns
    readers: Readers


class Outgoing:
    """One transfer: `send` in the order of the bytes, by one task at a time."""

    def __init__(self, use: LinkUse, landing: Landing, total_bytes: int | None, waits: bool = True) -> None:
        """waits: whether a `send` that is cancelled waits for the write that it began; `end` always does."""
        self._use, self._landing, self._waits = use, landing, waits
        self._writing: asyncio.Task[None] | None = None
        self._fits = total_bytes is not None and total_bytes <= landing.size
        self._ring, self._flow = SendRing(landing.size), Flow()
        self._answered = asyncio.Event()
        self._refused: ServiceError | None = None
        self._must_write = False  # the receiver cannot read this process's memory
        self._chunks = 0
        self._asked = False
        self._unconfirmed = Unconfirmed()
        self._ask_again_s = _ASK_AGAIN_S
        self._finished = False
        self.left_early = False  # whether `send` returned before all was taken, and promised that nothing is written
        self.in_doubt = False  # whether a write was given up and may still arrive

    @property
    def owner(self) -> str:
        """Name of the landing."""
        return self._landing.id

    @property
    def refused(self) -> ServiceError | None:
        """What the receiver refused the transfer for, if it did: `send` of the last pieces raises it to nobody."""
        return self._refused

    @property
    def finished(self) -> bool:
        """Whether the receiver knows that no more will be written."""
        return self._finished

    async def send(self, pieces: Pieces | Sequence[Piece], *, last: bool = False, early: bool = False) -> None:
        """Sends the pieces; returns when nobody needs them here any more. With `last` nothing may follow, and it
        returns when the receiver has said that everything is verified in its place, or that it is not: whoever waits
        for the bytes there is told the reason by the receiver itself.

        `early`, where the transfer leaves what is left of it to others: it returns as soon as the last piece was
        announced, if all that is not taken is lent to one that has read such memory before. Nothing is written from
        then on. What is left waits for the receiver's word; until its end the pieces stay as they are.

        Raises:
            InvalidArgument: a piece is larger than the landing; nothing of it was written.
            DeadlineExceeded: no credit, no turn, no word or no end of a push in time.
            Unavailable: the peer is gone.
            ServiceError: what the receiver refused the transfer for, such as DataLoss, before the last piece was sent.
        """
        await self._send_all(pieces if isinstance(pieces, Pieces) else Pieces.pack(pieces), last, asks=True)
        if last and early and len(self._unconfirmed) and self._may_leave():
            self.left_early = True
            return
        await (self._taken() if last else self._lent_taken())
        if self._refused is not None and not last:
            raise self._refused
        self._finished = last and self._refused is None

    async def begin(self, pieces: Pieces) -> None:
        """As `send`, but what is lent stays as it is until a later `send` has returned: this one waits for no word."""
        await self._send_all(pieces, last=False, asks=False)

    def lends_ahead(self, region: Region) -> bool:
        """Whether pieces of this region can be announced though others were not taken yet."""
        return self._ahead and self._lends(region)

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
                self._unreadable()
        self._answered.set()

    async def alive(self) -> None:
        """Tells the receiver that this writer is there. Raises ServiceError where it cannot be told."""
        await self._push([], Alive(self._landing.id).pack())

    async def settle(self) -> None:
        """Waits, where `send` returned early, until the receiver took everything, refused it or was silent too long."""
        if not self.left_early:
            return
        try:
            await self._taken()
        except ServiceError as error:
            _log.info("what was lent was not taken", code=error.code)
        self._finished = self._refused is None and not len(self._unconfirmed)

    async def end(self) -> None:
        """Tells the receiver that no more will be written, unless it knows: once the write under way has ended. It says
        no more than is known. Cancelled, it gives that write up."""
        if self._finished:
            return
        self._finished = True
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        message = Trailing(self._landing.id) if self.in_doubt else GaveUp(self._landing.id)
        address, timeout_s = self._landing.address, self._use.limits.timeout_s
        try:
            await self._use.link.push(address, [], notify=message.pack(), timeout_s=timeout_s)
        except ServiceError as error:
            _log.info("receiver not told that the transfer ended", code=error.code)

    def _lends(self, region: Region) -> bool:
        return not self._must_write and self._use.link.lends(self._landing.address, region)

    def _credit(self, credit: Credit) -> None:
        if credit.chunks > self._chunks:
            raise InvalidArgument(f"{credit.chunks} chunks taken of {self._chunks}", field="credit")
        self._ring.credit(credit.position)
        for chunk in self._unconfirmed.confirm(credit.chunks):
            self._ask_again_s = _ASK_AGAIN_S
            self._ring.credit(chunk.run.end)  # the receiver does not know where one is written that it took already
            if chunk.lent:
                self._use.link.was_read(self._landing.address)
                self._use.readers.add(self._landing.address, chunk.lent)

    def _unreadable(self) -> None:
        """The receiver cannot read what was lent to it. Where it was promised that nothing is written, that is all."""
        self._use.readers.drop(self._landing.address)
        if self.left_early:
            self._refused = Unavailable("what was lent cannot be read, and is not written any more")
        self._must_write = not self.left_early

    def _may_leave(self) -> bool:
        """Whether nothing will have to be written, as far as is known of the receiver."""
        if self._waits or self._must_write or self._refused is not None:
            return False
        address = self._landing.address
        return all(chunk.lent and self._use.readers.know(address, chunk.lent) for chunk in self._unconfirmed)

    @property
    def _ahead(self) -> bool:
        """Whether what is lent needs no place in the landing."""
        return self._landing.lent_bytes >= self._landing.size

    @property
    def _has_to_write(self) -> bool:
        """Whether something was lent that the receiver cannot read: it comes before all that follows."""
        return self._must_write and bool(self._unconfirmed.lent)

    def _chunk_bytes(self, lends: bool) -> int:
        """Half a landing at most, unless all fits: one half is taken out while the other is filled. What is lent fills
        nothing: the fewer words about it the better, since each finds its receiver's caches full of what it copied."""
        limits, size = self._use.limits, self._landing.size
        if lends and self._ahead:
            return max(1, self._landing.lent_bytes // _LENT_SHARE)
        whole = self._fits and self._ring.written < size
        most = limits.in_flight_bytes if lends else min(limits.chunk_bytes, limits.in_flight_bytes)
        return min(most, size if whole or lends else max(1, size // 2))

    async def _send_all(self, pieces: Pieces, last: bool, asks: bool) -> None:
        lends = any(self._lends(region) for region in pieces.regions)
        for first, end in pieces.spans(self._chunk_bytes(lends), lends) or ([(0, 0)] if last else []):
            is_end = end == len(pieces)
            await self._send_chunk(pieces.cut(first, end), last and is_end, asks and is_end)

    async def _send_chunk(self, pieces: Pieces, last: bool, asks: bool = True) -> None:
        """asks: whether credit is wanted for what is lent ahead."""
        region, nbytes = pieces.regions[int(pieces.of[0])] if len(pieces) else None, pieces.nbytes
        if (last or (nbytes and self._ahead)) and (region is None or not self._lends(region)):
            # What was lent might have to be written, and has no place yet: before what follows it, and before the
            # notice that says that no more is written.
            await self._lent_taken()
        ahead = region is not None and self.lends_ahead(region)
        run = await (self._room_to_lend(pieces) if ahead else self._place(nbytes))
        chunk = Announced(self._chunks, run, last, pieces, nbytes)
        self._chunks += 1
        self._unconfirmed.add(chunk)
        if region is not None and self._lends(region):
            chunk.lent = region.token.shared
            asks = asks or not ahead or 2 * self._unconfirmed.lent_bytes > self._landing.lent_bytes
            await self._lend(chunk, self._reply(asks))
        else:
            await self._write_chunk(chunk)

    async def _lend(self, chunk: Announced, reply: LinkAddress | None) -> None:
        """Tells where the bytes are: the receiver copies them from there."""
        chunk.pieces.extents.table["offset"] = chunk.pieces.starts
        self._note(chunk, reply)
        if not self._use.link.push_at_once(self._landing.address, [], notify=chunk.notice):
            await self._push([], chunk.notice)

    async def _write_chunk(self, chunk: Announced) -> None:
        """At once where the link can and nobody else waits for a turn, else in a turn of its own."""
        sizes, total = chunk.pieces.sizes, chunk.run.size
        offsets = chunk.run.offset + lay_out(sizes)
        chunk.lent = b""
        chunk.pieces.extents.table["offset"] = offsets
        self._note(chunk, self._reply(asks=self._is_enough(chunk.run) or not total))
        found = writes(self._landing, chunk.pieces, offsets, sizes)
        if self._use.turns.push_at_once(self._flow, total, self._landing.address, found, chunk.notice):
            await asyncio.sleep(0)  # many in a row must not keep the loop from others
        elif not total:
            await self._push([], chunk.notice)
        else:
            await self._push(found, chunk.notice, await self._use.turns.turn(self._flow, total))

    def _note(self, chunk: Announced, reply: LinkAddress | None) -> None:
        """The chunk's announcement; the last one can be answered by a receiver that has forgotten the transfer."""
        reply = self._use.link.address if chunk.last else reply
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
        return self._use.link.address

    async def _place(self, size: int) -> Run:
        if self._refused is None and not self._has_to_write and (run := self._ring.place(size)) is not None:
            return run
        return await self._in_time(self._credit_for(size), "no credit")

    async def _room_to_lend(self, pieces: Pieces) -> Run:
        """A run of no bytes: the announcement alone needs credit. One with room, where that will have to be written."""
        self._ring.require_fits(int(pieces.extents.table["size"].max()))
        if self._refused is None and not self._must_write and (run := self._place_to_lend(pieces.nbytes)) is not None:
            return run
        return await self._in_time(self._credit_to_lend(pieces.nbytes), "no credit")

    def _place_to_lend(self, size: int) -> Run | None:
        lent = self._unconfirmed.lent_bytes
        return self._ring.place(0) if not lent or lent + size <= self._landing.lent_bytes else None

    async def _in_time(self, work: Coroutine[Any, Any, ResultT], what: str) -> ResultT:
        peer, timeout_s = self._landing.address.peer, self._use.limits.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except TimeoutError as error:
            raise DeadlineExceeded(f"{what} from {peer} after {timeout_s:.3g} s") from error

    async def _credit_for(self, size: int) -> Run:
        while self._refused is None:
            run = None if self._has_to_write else self._ring.place(size)
            if run is not None:
                return run
            await self._ask()
        raise self._refused

    async def _credit_to_lend(self, size: int) -> Run:
        while self._refused is None and not self._must_write:
            run = self._place_to_lend(size)
            if run is not None:
                return run
            await self._ask()
        return await self._credit_for(size)

    async def _ask(self) -> None:
        """The receiver's next word. It is asked for one where it does not know whom to tell: a piece may be so large
        that it finds no place although half the landing is free."""
        lent = self._unconfirmed.lent
        if self._asked:
            await self._hear()
        elif lent:
            await self._lend(lent[-1], self._reply(asks=True))
        else:
            await self._send_chunk(NOTHING.cut(0, 0), last=False)

    async def _lent_taken(self) -> None:
        if self._unconfirmed.lent:
            if not self._asked:
                await self._ask()
            await self._taken()

    async def _taken(self) -> None:
        await self._in_time(self._all_taken(), "no word that everything was taken")

    async def _all_taken(self) -> None:
        while len(self._unconfirmed) and self._refused is None:
            await self._hear()

    async def _hear(self) -> None:
        """The receiver's next word. One that says nothing new, or none for a while, means that notices were lost."""
        if self._has_to_write and await self._write_lent():
            return
        before = len(self._unconfirmed), self._ring.in_flight
        self._answered.clear()
        with self._use.link.expecting(), suppress(TimeoutError):
            async with asyncio.timeout(self._ask_again_s):
                await self._answered.wait()
        if self._refused is not None or self._has_to_write:
            return
        if before == (len(self._unconfirmed), self._ring.in_flight):
            self._ask_again_s = min(2 * self._ask_again_s, _ASK_AGAIN_MOST_S)
            await self._announce_again()

    async def _write_lent(self) -> bool:
        """Writes what was lent, in order, as far as there is room in the landing. Whether there was any."""
        wrote = False
        while self._unconfirmed.lent:
            chunk = self._unconfirmed.lent[0]
            if chunk.run.size < chunk.nbytes and not self._place_lent(chunk):
                break
            await self._write_chunk(chunk)
            wrote = True
        return wrote

    def _place_lent(self, chunk: Announced) -> bool:
        """Gives what was lent ahead a place in the landing, or the start of it; the rest becomes a chunk behind it."""
        spans = chunk.pieces.spans(self._chunk_bytes(lends=False), apart=False)
        if len(spans) > 1:
            self._unconfirmed.split(chunk, spans[0][1])
            self._chunks += 1
        run = self._ring.place(chunk.nbytes)
        chunk.run = run or chunk.run
        return run is not None

    async def _announce_again(self) -> None:
        """Receivers take a chunk once, however often it is announced."""
        _log.info("chunks announced again", peer=self._landing.address.peer, chunks=len(self._unconfirmed))
        link, timeout_s = self._use.link, self._use.limits.timeout_s
        for chunk in self._unconfirmed:
            if not chunk.notice:
                break  # those that follow have to be written first
            await link.push(self._landing.address, [], notify=chunk.notice, timeout_s=timeout_s)

    async def _push(self, found: Sequence[Write], notify: bytes, then: Callable[[], None] | None = None) -> None:
        """Pushes to its end even when the caller is cancelled: the source must not change meanwhile. `then`: called at
        that end."""
        self._writing = asyncio.ensure_future(self._write(found, notify))
        if then is not None:
            self._writing.add_done_callback(lambda _: then())
        await (to_its_end(self._writing) if self._waits else asyncio.shield(self._writing))

    async def _write(self, found: Sequence[Write], notify: bytes) -> None:
        link, timeout_s = self._use.link, self._use.limits.timeout_s
        try:
            await link.push(self._landing.address, found, notify=notify, timeout_s=timeout_s)
        except (InvalidArgument, StaleTicket):  # refused whole: nothing of it was written, nor will be
            raise
        except BaseException:
            self.in_doubt = self.in_doubt or bool(found)
            raise
