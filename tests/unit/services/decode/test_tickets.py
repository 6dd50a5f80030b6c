"""A ticket has one owner, one end, and never outlives its lease unused."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fabric.deaths import Incarnation
from fabric.errors import Exhausted, StaleTicket
from services.decode.tickets import EXTENSION, TicketBook, TicketState, WriterState

EPOCH, LEASE_S = 7, 10.0
WRITER, OLDER = Incarnation("p", 2), Incarnation("p", 1)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> TicketBook:
    return TicketBook(EPOCH, LEASE_S, max_tickets=2, clock=clock)


def test_a_ticket_is_claimed_once(book: TicketBook) -> None:
    book.issue("t", "r")
    assert book.claim("t", "r", EPOCH).state is TicketState.GENERATING
    with pytest.raises(StaleTicket, match="generating"):
        book.claim("t", "r", EPOCH)


@pytest.mark.parametrize(
    ("ticket", "request_id", "epoch", "says"),
    [("t", "r", 6, "epoch 6"), ("x", "r", EPOCH, "unknown"), ("t", "other", EPOCH, "unknown")],
)
def test_a_foreign_ticket_is_stale(book: TicketBook, ticket: str, request_id: str, epoch: int, says: str) -> None:
    book.issue("t", "r")
    with pytest.raises(StaleTicket, match=says):
        book.claim(ticket, request_id, epoch)


def test_every_late_lease_is_swept_and_told_as_expired(book: TicketBook, clock: Clock) -> None:
    book.issue("a", "ra")
    clock.now = 6.0
    book.issue("b", "rb")
    clock.now = 9.9
    book.arrived("a", last=False, sender=WRITER)  # renewed: now the older ticket has the later lease
    clock.now = 17.0
    assert {ticket.id for ticket in book.sweep()} == {"a", "b"}
    with pytest.raises(StaleTicket, match="expired"):
        book.claim("a", "ra", EPOCH)


def test_an_expired_ticket_is_refused_even_before_the_sweep(book: TicketBook, clock: Clock) -> None:
    book.issue("a", "ra")
    clock.now = LEASE_S
    with pytest.raises(StaleTicket, match="expired"):
        book.claim("a", "ra", EPOCH)


def test_a_sign_of_life_extends_a_lease_and_never_shortens_it(book: TicketBook, clock: Clock) -> None:
    ticket = book.issue("a", "ra")
    book.arrived("a", last=False, sender=WRITER)
    assert ticket.expires_at == LEASE_S
    clock.now = 9.0
    book.arrived("a", last=False, sender=WRITER)
    assert ticket.expires_at == pytest.approx(9.0 + EXTENSION * LEASE_S)


@pytest.mark.parametrize("sender", [OLDER, Incarnation("q", 2)])
def test_what_another_than_the_writer_says_changes_nothing(book: TicketBook, clock: Clock, sender: Incarnation) -> None:
    ticket = book.issue("a", "ra", WRITER)
    clock.now = 9.0
    book.arrived("a", last=True, sender=sender)
    assert (ticket.state, ticket.expires_at) == (TicketState.RESERVED, LEASE_S)
    book.close("a", WriterState.UNKNOWN)
    assert not book.arrived("a", last=True, sender=sender)
    assert book.in_doubt() == [ticket]


def test_a_writer_that_gave_up_is_still_in_doubt_and_only_by_its_own_word(book: TicketBook) -> None:
    ticket = book.issue("a", "ra", WRITER)
    book.close("a", WriterState.UNKNOWN)
    book.trails("a", OLDER)
    assert not ticket.trailing
    book.trails("a", WRITER)
    assert ticket.trailing and book.in_doubt() == [ticket]


def test_a_proven_death_ends_a_doubt(book: TicketBook) -> None:
    book.issue("a", "ra", WRITER)
    book.close("a", WriterState.UNKNOWN)
    assert book.close("a", WriterState.DEAD) is not None
    assert len(book) == 0


@pytest.mark.parametrize("said", [WriterState.FINISHED, WriterState.NEVER_STARTED])
@pytest.mark.parametrize("generating", [False, True])
def test_nobody_elses_word_ends_a_writer_that_was_heard(book: TicketBook, said: WriterState, generating: bool) -> None:
    """The gateway's guess about a writer must not hand its landing to another one while it writes."""
    ticket = book.issue("a", "ra", WRITER)
    book.arrived("a", last=False, sender=WRITER)
    if generating:
        book.claim("a", "ra", EPOCH)
    book.close("a", said)
    assert ticket.state is TicketState.QUARANTINED
    assert book.close("a", said) is None and book.in_doubt() == [ticket]
    assert book.arrived("a", last=True, sender=WRITER)
    assert len(book) == 0


def test_a_writer_that_says_its_writes_may_still_arrive_is_not_finished_because_the_gateway_says_so(
    book: TicketBook,
) -> None:
    ticket = book.issue("a", "ra", WRITER)
    book.trails("a", WRITER)
    book.close("a", WriterState.FINISHED)
    assert ticket.state is TicketState.QUARANTINED and ticket.trailing


def test_a_doubt_about_a_writer_that_finished_by_anothers_word_lasts_as_long_as_what_is_on_its_way_may_take(
    book: TicketBook,
) -> None:
    ticket = book.issue("a", "ra", WRITER)
    book.arrived("a", last=False, sender=WRITER)
    book.close("a", WriterState.FINISHED)
    assert ticket.trailing
    book.arrived("a", last=False, sender=WRITER)
    assert not ticket.trailing, "it goes on: the other was wrong"


def test_a_writer_that_was_never_heard_is_known_by_others_alone(book: TicketBook) -> None:
    for number, said in enumerate((WriterState.FINISHED, WriterState.NEVER_STARTED)):
        book.issue(str(number), "r", WRITER)
        book.close(str(number), said)
    assert len(book) == 0


def test_generating_tickets_have_no_lease(book: TicketBook, clock: Clock) -> None:
    book.issue("a", "ra")
    book.claim("a", "ra", EPOCH)
    clock.now = 1e6
    assert book.sweep() == []


def test_a_ticket_in_doubt_stays_quarantined_until_its_writer_says_it_is_done(book: TicketBook) -> None:
    book.issue("a", "ra")
    book.arrived("a", last=False, sender=WRITER)
    assert book.close("a", WriterState.UNKNOWN) is not None
    assert (len(book), book.open) == (1, 0)
    assert not book.arrived("a", last=False, sender=WRITER)
    assert book.arrived("a", last=True, sender=WRITER)
    assert len(book) == 0


def test_a_writer_known_to_be_finished_needs_no_quarantine(book: TicketBook) -> None:
    book.issue("a", "ra")
    book.arrived("a", last=True, sender=WRITER)
    book.close("a", WriterState.UNKNOWN)
    assert len(book) == 0


def test_release_is_idempotent(book: TicketBook) -> None:
    book.issue("a", "ra")
    assert book.close("a", WriterState.NEVER_STARTED) is not None
    assert book.close("a", WriterState.NEVER_STARTED) is None
    assert book.close("never", WriterState.FINISHED) is None


def test_tickets_are_bounded(book: TicketBook) -> None:
    book.issue("a", "ra")
    book.issue("b", "rb")
    with pytest.raises(Exhausted):
        book.issue("c", "rc")


class Storm(RuleBasedStateMachine):
    """Whatever happens in whatever order: open tickets are bounded, have at most one owner, and all end."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.book = TicketBook(EPOCH, LEASE_S, max_tickets=4, clock=self.clock)
        self.issued = 0
        self.owned: set[str] = set()

    ids = st.integers(0, 12).map(str)

    @rule()
    def issue(self) -> None:
        try:
            self.book.issue(str(self.issued), f"r{self.issued}")
            self.issued += 1
        except Exhausted:
            assert self.book.open == 4

    @rule(ticket=ids)
    def claim(self, ticket: str) -> None:
        try:
            self.book.claim(ticket, f"r{ticket}", EPOCH)
        except StaleTicket:
            return
        assert ticket not in self.owned
        self.owned.add(ticket)

    @rule(ticket=ids, last=st.booleans())
    def arrived(self, ticket: str, last: bool) -> None:
        self.book.arrived(ticket, last, WRITER)

    @rule(ticket=ids, writer=st.sampled_from(WriterState))
    def close(self, ticket: str, writer: WriterState) -> None:
        heard = {each.id for each in self.book._live.values() if each.heard and not each.writer_finished}
        self.book.close(ticket, writer)
        if writer is not WriterState.DEAD:
            assert heard <= self.book._live.keys(), "only a writer's own word, or its death, frees what it writes to"

    @rule(seconds=st.floats(0, 12))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.book.sweep()

    @invariant()
    def bounded(self) -> None:
        assert 0 <= self.book.open <= 4
        assert self.book.open <= len(self.book) <= self.issued

    def teardown(self) -> None:
        for ticket in range(self.issued):
            self.book.close(str(ticket), WriterState.DEAD)
        assert len(self.book) == 0


TestStorm = Storm.TestCase
TestStorm.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
