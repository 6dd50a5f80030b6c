"""Desk: reservations from start to end. Joins tickets, engine memory and landings; admits only verified KV."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engine.requests import HeldKV, Reservation
from engine.runner import EngineRunner
from fabric.deaths import Incarnation
from fabric.errors import InvalidArgument, ServiceError, Unavailable
from fabric.kvlink import Link, Notice
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.slabs import Writer
from fabric.kvlink.verify import Placement
from fabric.records import Landing
from fabric.telemetry import logs
from services.decode.telemetry import DecodeMetrics
from services.decode.tickets import Ticket, TicketBook, TicketState, WriterState
from services.decode.wake import Wake
from services.worker.extents import extent_view
from services.worker.failures import engine_errors
from services.worker.geometry import Handoff
from services.worker.notices import HandoffNotice
from services.worker.receipts import Receipt, require_complete

_log = logs.get("desk")


@dataclass(frozen=True, slots=True)
class ReserveAsk:
    """`tokens` are the prompt and what was generated after it in an earlier life."""

    request_id: str
    tokens: tuple[int, ...]
    max_total_tokens: int
    salt: bytes
    use_cache: bool
    layout_fingerprint: str
    model_revision: str
    writer: Incarnation | None = None
    epoch: int = 0  # of the worker that is meant; 0: whichever answers


_LANDING_WRITERS = {
    WriterState.FINISHED: Writer.FINISHED,
    WriterState.DEAD: Writer.DEAD,
    WriterState.NEVER_STARTED: Writer.NEVER_STARTED,
    WriterState.UNKNOWN: Writer.FINISHED,  # the book, which knows of the last notice, did not doubt it
}


@dataclass(frozen=True, slots=True)
class Holding:
    """What one ticket holds: engine memory by its request id and, until it is verified, a landing."""

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
        max_total_tokens: int,
        wake: Wake,
    ) -> None:
        self._engine, self._link, self._landings, self._book = engine, link, landings, book
        self._mint, self._metrics, self.max_total_tokens = mint, metrics, max_total_tokens
        self._wake, self._draining = wake, False
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
        self._require_pair(ask)
        if ask.max_total_tokens > self.max_total_tokens:
            raise InvalidArgument(
                f"{ask.max_total_tokens} tokens of prompt and output; this worker takes {self.max_total_tokens}",
                field="max_total_tokens",
                fix="shorten the prompt or lower max_tokens",
            )
        reservation = await self._reserve_memory(ask)
        try:
            handoff = Handoff(self._engine.engine.model.layout, len(ask.tokens), reservation.held_tokens)
            ticket_id = self._mint()
            landing = self._landings.grant(ticket_id, handoff.landing_bytes)
            try:
                self._book.issue(ticket_id, ask.request_id, ask.writer)
            except ServiceError:
                self._landings.release(ticket_id, Writer.NEVER_STARTED)
                raise
        except BaseException:
            self._engine.release(ask.request_id)
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
        """Copies everything the prompt needs out of the landing, checking each digest on the copy.

        Raises:
            InvalidArgument: the receipt is another request's or another model's.
            DataLoss: an extent is missing, or its bytes are not as they were sealed.
        """
        model = self._engine.engine.model
        _require_equal("receipt.ticket_id", receipt.ticket_id, holding.ticket_id)
        _require_equal("receipt.request_id", receipt.request_id, holding.ask.request_id)
        _require_equal("receipt.model_revision", receipt.model_revision, model.revision)
        _require_equal("receipt.layout_fingerprint", receipt.layout_fingerprint, model.layout.fingerprint)
        with self._metrics.transfer(holding.handoff.landing_bytes):
            require_complete(receipt, holding.handoff)
            kv = HeldKV(holding.reservation.blocks, holding.reservation.slot, len(holding.ask.tokens))
            pool = self._engine.engine.pool
            placements = [Placement(item, extent_view(pool, item.group, item.block, kv)) for item in receipt.extents]
            await self._landings.commit(holding.ticket_id, placements)
        self._book.complete(holding.ticket_id)
        self._landings.release(holding.ticket_id, Writer.FINISHED)

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
        """A writer's notice arrived."""
        notice = HandoffNotice.load(arrived.payload)
        if notice is None:
            return
        self.signs += 1
        sender = Incarnation(arrived.peer, arrived.epoch)
        if notice.trailing:
            self._book.trails(notice.handoff_id, sender)
        elif self._book.arrived(notice.handoff_id, notice.last, sender):
            self._landings.release(notice.handoff_id, Writer.FINISHED)

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

    def _drop(self, ticket: Ticket, writer: WriterState) -> None:
        """Safe to repeat: a ticket in quarantine drops its engine memory now, its landing when its writer is done."""
        holding = self._holdings.pop(ticket.id, None)
        if holding is not None:
            self._engine.release(holding.ask.request_id)
        in_doubt = ticket.state is TicketState.QUARANTINED
        self._landings.release(ticket.id, Writer.UNKNOWN if in_doubt else _LANDING_WRITERS[writer])

    async def _reserve_memory(self, ask: ReserveAsk) -> Reservation:
        tokens = ask.tokens if ask.use_cache else None
        with engine_errors():
            return await self._engine.reserve(ask.request_id, len(ask.tokens), ask.max_total_tokens, ask.salt, tokens)

    def _require_pair(self, ask: ReserveAsk) -> None:
        model = self._engine.engine.model
        if (ask.model_revision, ask.layout_fingerprint) != (model.revision, model.layout.fingerprint):
            raise InvalidArgument(
                f"prefill has revision {ask.model_revision!r} and layout {ask.layout_fingerprint!r}, "
                f"decode has {model.revision!r} and {model.layout.fingerprint!r}",
                field="layout_fingerprint" if ask.model_revision == model.revision else "model_revision",
                fix="pair workers that serve the same weights in the same layout",
            )


def _require_equal(field: str, theirs: str, ours: str) -> None:
    if theirs != ours:
        raise InvalidArgument(f"{theirs!r} is not {ours!r}", field=field, fix="send the receipt of this request")
