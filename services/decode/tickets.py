"""Tickets: who may use which reservation, and until when. A pure state machine without memory, engine or own clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from fabric.deaths import Incarnation
from fabric.errors import Exhausted, StaleTicket

_REMEMBERED = 4096  # ended tickets whose fate is still told to a late caller
# A sign of life extends a lease to this share of its whole length and never shortens it; writers give one every sixth,
# so that three in a row may be lost or late.
EXTENSION = 2 / 3


class TicketState(StrEnum):
    RESERVED = "reserved"  # room is taken, nothing came
    RECEIVING = "receiving"  # the writer has begun
    READY = "ready"  # the writer says that everything is written
    GENERATING = "generating"  # owned by one Generate call; the lease no longer counts
    QUARANTINED = "quarantined"  # given up while its writer may still write
    RELEASED = "released"
    EXPIRED = "expired"


class WriterState(StrEnum):
    """What is known of the writer when a ticket ends."""

    FINISHED = "finished"
    DEAD = "dead"  # proven: see fabric.deaths
    UNKNOWN = "unknown"
    NEVER_STARTED = "never_started"


_WAITING = frozenset({TicketState.RESERVED, TicketState.RECEIVING, TicketState.READY})


@dataclass(slots=True)
class Ticket:
    """One reservation. `expires_at` is on the desk's clock; `writer` is None until it is named or says something."""

    id: str
    request_id: str
    expires_at: float
    writer: Incarnation | None = None
    state: TicketState = TicketState.RESERVED
    heard: bool = False  # the writer has said something: then how it ended is its own to say
    writer_finished: bool = False
    trailing: bool = False  # the writer starts no write any more; what it gave up may still arrive


class TicketBook:
    """All tickets of one decode incarnation."""

    def __init__(self, epoch: int, lease_s: float, max_tickets: int, clock: Callable[[], float]) -> None:
        self.epoch, self.lease_s = epoch, lease_s
        self._max_tickets, self._clock = max_tickets, clock
        self._live: dict[str, Ticket] = {}
        self._ended: OrderedDict[str, TicketState] = OrderedDict()

    def __len__(self) -> int:
        """Tickets that hold something, quarantined ones included."""
        return len(self._live)

    @property
    def open(self) -> int:
        """Tickets whose work is not over: what a drain waits for."""
        return sum(ticket.state is not TicketState.QUARANTINED for ticket in self._live.values())

    def in_doubt(self) -> list[Ticket]:
        """Tickets that are over but for their writers."""
        return [ticket for ticket in self._live.values() if ticket.state is TicketState.QUARANTINED]

    def require_epoch(self, epoch: int) -> None:
        """Raises StaleTicket where the caller means another incarnation of this worker."""
        if epoch != self.epoch:
            raise StaleTicket(f"meant for epoch {epoch}, this worker is in epoch {self.epoch}", fix=_RESERVE_AGAIN)

    def issue(self, ticket_id: str, request_id: str, writer: Incarnation | None = None) -> Ticket:
        """A new ticket with a full lease. `writer` is the only one whose notices count; None: the first one to come.

        Raises:
            Exhausted: as many tickets as allowed are live.
        """
        if self.open >= self._max_tickets:  # those in quarantine are bounded by the landing memory
            raise Exhausted(f"{self.open} tickets are open", fix="retry later or on another worker", retry_after_s=0.5)
        ticket = self._live[ticket_id] = Ticket(ticket_id, request_id, self._clock() + self.lease_s, writer)
        return ticket

    def arrived(self, ticket_id: str, last: bool, sender: Incarnation) -> bool:
        """Notes a sign of life from the writer and renews the lease; `last` says that it will write no more.

        What another than the ticket's writer sends changes nothing. Returns True when this frees a quarantined ticket's
        memory: the ticket is then gone.
        """
        ticket = self._live.get(ticket_id)
        if ticket is None:
            return False
        ticket.writer = ticket.writer or sender
        if not ticket.writer.is_same(sender.instance, sender.epoch):
            return False
        ticket.heard, ticket.trailing = True, False  # whoever goes on writing has not ended
        return self._heard(ticket, last)

    def trails(self, ticket_id: str, sender: Incarnation) -> None:
        """The writer gave up a write that may still arrive, and starts no other. Renews nothing."""
        ticket = self._live.get(ticket_id)
        if ticket is not None:
            ticket.writer = ticket.writer or sender
            if ticket.writer.is_same(sender.instance, sender.epoch):
                ticket.heard = ticket.trailing = True

    def complete(self, ticket_id: str) -> None:
        """Everything that was to be written is here and verified: nothing more will come, whatever the writer says."""
        ticket = self._live.get(ticket_id)
        if ticket is not None:
            self._heard(ticket, last=True)

    def _heard(self, ticket: Ticket, last: bool) -> bool:
        ticket.writer_finished = ticket.writer_finished or last
        if ticket.state is TicketState.QUARANTINED:
            return last and self._end(ticket, TicketState.RELEASED)
        if ticket.state in _WAITING:
            ticket.state = TicketState.READY if ticket.writer_finished else TicketState.RECEIVING
            ticket.expires_at = max(ticket.expires_at, self._clock() + EXTENSION * self.lease_s)
        return False

    def claim(self, ticket_id: str, request_id: str, epoch: int) -> Ticket:
        """Hands a waiting ticket to one Generate call.

        Raises:
            StaleTicket: another epoch's, ended, expired, unknown, or claimed already.
        """
        self.require_epoch(epoch)
        ticket = self._live.get(ticket_id)
        if ticket is None or ticket.request_id != request_id or ticket.state not in _WAITING:
            raise StaleTicket(f"the ticket is {self._fate(ticket_id, request_id)}", fix=_RESERVE_AGAIN)
        if ticket.expires_at <= self._clock():
            raise StaleTicket("the ticket is expired", fix=_RESERVE_AGAIN)
        ticket.state = TicketState.GENERATING
        return ticket

    def close(self, ticket_id: str, writer: WriterState) -> Ticket | None:
        """Ends a ticket; None if there is nothing (more) to end. Quarantined while its writer is in doubt.

        Of a writer that was heard nobody else's word counts that it finished, or never started: without its own it is
        in doubt, though not for long where somebody says so.
        """
        ticket = self._live.get(ticket_id)
        if ticket is None:
            return None
        writer = self._believed(ticket, writer)
        if ticket.state is TicketState.QUARANTINED:
            return ticket if writer is not WriterState.UNKNOWN and self._end(ticket, TicketState.RELEASED) else None
        self._leave(ticket, writer, TicketState.RELEASED)
        return ticket

    def _believed(self, ticket: Ticket, writer: WriterState) -> WriterState:
        if writer in (WriterState.UNKNOWN, WriterState.DEAD) or ticket.writer_finished or not ticket.heard:
            return writer
        ticket.trailing = ticket.trailing or writer is WriterState.FINISHED
        return WriterState.UNKNOWN

    def sweep(self) -> list[Ticket]:
        """Expires every waiting ticket whose lease is over. Looks at all of them: leases are not in order."""
        now = self._clock()
        late = [ticket for ticket in self._live.values() if ticket.state in _WAITING and ticket.expires_at <= now]
        for ticket in late:
            self._leave(ticket, WriterState.UNKNOWN, TicketState.EXPIRED)
        return late

    def _leave(self, ticket: Ticket, writer: WriterState, ending: TicketState) -> None:
        if writer is WriterState.UNKNOWN and not ticket.writer_finished:
            ticket.state = TicketState.QUARANTINED
            self._remember(ticket.id, ending)
        else:
            self._end(ticket, ending)

    def _end(self, ticket: Ticket, ending: TicketState) -> bool:
        del self._live[ticket.id]
        ticket.state = ending
        self._remember(ticket.id, ending)
        return True

    def _remember(self, ticket_id: str, ending: TicketState) -> None:
        self._ended.setdefault(ticket_id, ending)
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _fate(self, ticket_id: str, request_id: str) -> str:
        ticket = self._live.get(ticket_id)
        if ticket is not None and ticket.request_id != request_id:
            return "unknown"  # not this caller's: it learns nothing about it
        return str(self._ended.get(ticket_id) or (ticket.state if ticket else "unknown"))


_RESERVE_AGAIN = "reserve again"
