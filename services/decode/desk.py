"""Desk: reservations from start to end. Joins tickets, engine memory and landings; admits only verified KV."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engine.prefix import Salt
from engine.requests import HeldKV, Reservation
from engine.runner import EngineRunner
from fabric.deaths import Incarnation
from fabric.errors import InvalidArgument, ServiceError, Unavailable
from fabric.kvlink import Link, Notice
from fabric.kvlink.answers import Peer
from fabric.kvlink.incoming import Intake
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.messages import Word
from fabric.kvlink.slabs import Writer
from fabric.records import Landing
from fabric.retention import UNOWNED, Keeping
from fabric.telemetry import logs
from services.decode.places import Places
from services.decode.telemetry import DecodeMetrics
from services.decode.tickets import Ticket, TicketBook, TicketState, WriterState
from services.decode.wake import Wake
from services.worker.failures import engine_errors
from services.worker.geometry import Handoff
from services.worker.pairing import Records, require_pair
from services.worker.receipts import Receipt, require_complete, require_verified

_log = logs.get("desk")


@dataclass(frozen=True, slots=True)
class ReserveAsk:
    """`tokens` are the prompt and what was generated after it in an earlier life; `records` are what prefill writes."""

    request_id: str
    tokens: tuple[int, ...]
    max_total_tokens: int
    salt: Salt
    use_cache: bool
    records: Records
    writer: Incarnation | None = None
    epoch: int = 0  # of the worker that is meant; 0: whichever answers
    keeping: Keeping = UNOWNED


_LANDING_WRITERS = {
    WriterState.FINISHED: Writer.FINISHED,
    WriterState.DEAD: Writer.DEAD,
    WriterState.NEVER_STARTED: Writer.NEVER_STARTED,
    WriterState.UNKNOWN: Writer.FINISHED,  # the book, which knows of the last notice, did not doubt it
}


@dataclass(frozen=True, slots=True)
class Limits:
    """max_total_tokens: of prompt and output. window_bytes: landing memory of one handoff, at most. handoff_s: from the
    receipt, which leaves when everything is written, until everything is verified."""

    max_total_tokens: int
    window_bytes: int = 16 << 20
    handoff_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Holding:
    """What one ticket holds: engine memory by the ticket's id and, until all is verified, a landing.

    `handoff` is counted in prefill's blocks.
    """

    ticket_id: str
    ask: ReserveAsk
    reservation: Reservation
    handoff: Handoff
    landing: Landing


class Desk:
    """Every holding leaves by `_drop`, exactly once, whoever ends it."""

    def __init__(
        self,
        engine: EngineRunner,
        link: Link,
        landings: LandingPool,
        book: TicketBook,
        mint: Callable[[], str],
        metrics: DecodeMetrics,
        limits: Limits,
        wake: Wake,
    ) -> None:
        self._engine, self._link, self._landings, self._book = engine, link, landings, book
        self._mint, self._metrics, self.limits = mint, metrics, limits
        self._wake, self._draining = wake, False
        self._intake = Intake(link, landings, self._heard)
        self._holdings: dict[str, Holding] = {}
        self.signs = 0  # notices and sweeps: they move while tickets wait, though the engine has nothing to do

    @property
    def open(self) -> int:
        """Tickets that a drain waits for."""
        return self._book.open

    @property
    def quarantined(self) -> int:
        """Tickets whose writers are in doubt."""
        return len(self._book) - self._book.open

    @property
    def unfit(self) -> str:
        """Why no reservation can be given before something outside changes; empty while they can."""
        return "too much landing memory is in doubt" if self._landings.blocked else ""

    def drain(self) -> None:
        """From now on nobody gets a reservation; those that there are go on."""
        self._draining = True

    async def reserve(self, ask: ReserveAsk) -> Holding:
        """Takes blocks, a window slot and a landing, or nothing.

        Raises:
            StaleTicket: another incarnation of this worker is meant.
            Unavailable: this worker drains.
            InvalidArgument: the pair cannot work, or the request can never fit.
            Exhausted: no room now.
        """
        if ask.epoch:
            self._book.require_epoch(ask.epoch)
        if self._draining:
            raise Unavailable("this worker drains", fix="reserve on another worker")
        model = self._engine.engine.model
        require_pair(ask.records, Records(model.revision, model.layout))
        if ask.max_total_tokens > self.limits.max_total_tokens:
            raise InvalidArgument(
                f"{ask.max_total_tokens} tokens of prompt and output; this worker takes {self.limits.max_total_tokens}",
                field="max_total_tokens",
                fix="shorten the prompt or lower max_tokens",
            )
        ticket_id = self._mint()
        reservation = await self._reserve_memory(ticket_id, ask)
        try:
            return self._issue(ticket_id, ask, reservation)
        except BaseException:
            self._engine.release(ticket_id)
            raise

    def _issue(self, ticket_id: str, ask: ReserveAsk, reservation: Reservation) -> Holding:
        """Landing and ticket for what the engine reserved, or nothing."""
        handoff = Handoff.beyond(ask.records.layout, len(ask.tokens), reservation.held_tokens)
        kv = HeldKV(reservation.blocks, reservation.slot, len(ask.tokens))
        places = Places(self._engine.engine.pool, handoff, kv, reservation.held_tokens)
        writer = (ask.writer.instance, ask.writer.epoch) if ask.writer is not None else None
        # One byte where decode holds everything: the writer still has to say that it is done.
        window = max(1, min(handoff.landing_bytes, max(self.limits.window_bytes, handoff.layout.largest_extent)))
        landing = self._intake.open(ticket_id, window, places, writer, places.all)
        try:
            self._book.issue(ticket_id, ask.request_id, ask.writer)
        except ServiceError:
            self._intake.stop(ticket_id, Writer.NEVER_STARTED)
            raise
        holding = self._holdings[ticket_id] = Holding(ticket_id, ask, reservation, handoff, landing)
        return holding

    @asynccontextmanager
    async def serving(self, ticket_id: str, request_id: str, epoch: int) -> AsyncIterator[Holding]:
        """Claims a ticket for one Generate call; whatever the call's end, nothing is held after it.

        Raises:
            StaleTicket: another epoch's, ended, expired, unknown, or claimed already.
        """
        self._book.claim(ticket_id, request_id, epoch)
        holding = self._holdings[ticket_id]
        try:
            yield holding
        finally:
            self.release(ticket_id, WriterState.UNKNOWN)  # the book knows better where the writer said that it is done

    async def verify(self, holding: Holding, receipt: Receipt) -> None:
        """Returns once everything that the prompt needs is in its place, each digest checked on the copy.

        Raises:
            InvalidArgument: the receipt is another request's or another model's.
            DataLoss: an extent is missing, or its bytes are not as they were sealed.
            ServiceError: its writer gave up, or what it wrote did not arrive in time.
        """
        ask, handoff = holding.ask, holding.handoff
        _require_equal("receipt.ticket_id", receipt.ticket_id, holding.ticket_id)
        _require_equal("receipt.request_id", receipt.request_id, ask.request_id)
        _require_equal("receipt.model_revision", receipt.model_revision, ask.records.model_revision)
        _require_equal("receipt.layout_fingerprint", receipt.layout_fingerprint, handoff.layout.fingerprint)
        with self._metrics.transfer(handoff.landing_bytes):
            require_complete(receipt, handoff)
            verified = await self._intake.ready(holding.ticket_id, self.limits.handoff_s)
            require_verified(receipt.extents, verified)
        self._book.complete(holding.ticket_id)
        self._intake.stop(holding.ticket_id, Writer.FINISHED)

    def release(self, ticket_id: str, writer: WriterState, epoch: int = 0) -> bool:
        """Ends a ticket; False if there was nothing to end. Safe to repeat.

        Raises:
            StaleTicket: another incarnation of this worker is meant; with epoch 0 whichever answers is.
        """
        if epoch:
            self._book.require_epoch(epoch)
        ticket = self._book.close(ticket_id, writer)
        if ticket is not None:
            self._drop(ticket, writer)
        return ticket is not None

    def noticed(self, arrived: Notice) -> None:
        """A notice arrived; one that is no writer's is dropped."""
        self._intake.noticed(arrived)

    def _heard(self, ticket_id: str, writer: Peer, word: Word) -> None:
        """The writer of a ticket said something."""
        self.signs += 1
        sender = Incarnation(*writer)
        if word is Word.TRAILING:
            self._book.trails(ticket_id, sender)
        elif self._book.arrived(ticket_id, word is Word.DONE, sender):
            self._intake.stop(ticket_id, Writer.FINISHED)

    def sweep(self) -> None:
        """Ends every ticket whose lease is over, and every doubt whose writer is over for long enough."""
        self.signs += 1
        for ticket in self._book.sweep():
            self._metrics.lease_expired()
            _log.warning("lease expired", ticket_request=ticket.request_id)
            self._drop(ticket, WriterState.UNKNOWN)
        self._landings.sweep()
        for ticket_id in self._wake.over(self._book.in_doubt()):
            _log.info("landing freed: its writer is over", ticket=ticket_id)
            self.release(ticket_id, WriterState.DEAD)

    async def sweep_every(self, period_s: float) -> None:
        """Sweeps until cancelled."""
        while True:
            self.sweep()
            await asyncio.sleep(period_s)

    async def follow(self) -> None:
        """Takes the link's notices until cancelled."""
        async for notice in self._link.notices():
            self.noticed(notice)

    async def close(self) -> None:
        """Ends what is still being copied; before the engine and the link close."""
        await self._intake.aclose()

    def _drop(self, ticket: Ticket, writer: WriterState) -> None:
        """Safe to repeat: a ticket in quarantine drops its engine memory now, its landing when its writer is done."""
        in_doubt = ticket.state is TicketState.QUARANTINED
        copying = self._intake.stop(ticket.id, Writer.UNKNOWN if in_doubt else _LANDING_WRITERS[writer])
        holding = self._holdings.pop(ticket.id, None)
        if holding is None:
            return
        if copying is None:
            self._engine.release(holding.ticket_id)
        else:  # blocks that a chunk is copied into are not another's before it ended
            copying.add_done_callback(lambda _: self._engine.release(holding.ticket_id))

    async def _reserve_memory(self, ticket_id: str, ask: ReserveAsk) -> Reservation:
        """Memory under the ticket's name: a request may have several, and the end of one must not be another's."""
        tokens = ask.tokens if ask.use_cache else None
        with engine_errors():
            return await self._engine.reserve(ticket_id, len(ask.tokens), ask.max_total_tokens, ask.salt, tokens)


def _require_equal(field: str, theirs: str, ours: str) -> None:
    if theirs != ours:
        raise InvalidArgument(f"{theirs!r} is not {ours!r}", field=field, fix="send the receipt of this request")
