"""A state machine over tickets, desk, landings and engine memory, with writers that freeze, die, lie and wake.

The machine knows the truth: who may still write where. The desk knows only what it is told. After every step memory is
conserved, no slab was given away while its former writer could write, what was verified is as it was sealed, and desk
and book agree. At the end, once all writers are gone, nothing is held.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.requests import HeldKV, Reservation
from engine.sampling.params import SamplingState
from fabric.deaths import Deaths, Incarnation
from fabric.errors import Cancelled, DataLoss, DeadlineExceeded, Exhausted, StaleTicket, Unavailable
from fabric.kvlink import Notice, Region, messages, plan
from fabric.kvlink.credit import Run
from fabric.kvlink.extents import Extents
from fabric.kvlink.inproc import InprocLink
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.messages import Alive, Chunk, GaveUp, Trailing
from fabric.kvlink.slabs import SlabState
from fabric.kvlink.verify import digest
from fabric.processes import ProcessId
from fabric.telemetry.metrics import Metrics
from services.decode.desk import Desk, Holding, Limits, ReserveAsk
from services.decode.telemetry import DecodeMetrics
from services.decode.tickets import TicketBook, WriterState
from services.decode.wake import LINGER_S, LONGEST_STEP_S, Wake
from services.worker.extents import extent_view
from services.worker.geometry import Place
from services.worker.pairing import Records
from services.worker.receipts import Receipt
from tests.support.clock import FakeClock
from tests.support.fakefamily import MODEL, fake_engine

EPOCH, LEASE_S, TICKETS = 70, 30.0, 6
SLABS, SLAB_BYTES = 30, 64
ResultT = TypeVar("ResultT")
picks = st.integers(0, 1_000)
seen: Counter[str] = Counter()  # what the machine came across: a property of what never happens proves nothing
MUST_SEE = (
    "verified",
    "damage found",
    "refused before all was there",
    "freed by death",
    "late write",
    "released again",
    "refused while blocked",
    "verified what was lent",
    "damage found in what was lent",
    "written since it could not be read",
)


class ReadingLink(InprocLink):
    """Decode's link on a host where it can read what a writer lends, while that is there and it is let."""

    def __init__(self, name: str, epoch: int) -> None:
        super().__init__(name, epoch)
        self.readable: dict[bytes, np.ndarray] = {}

    def view(self, peer: str, epoch: int, shared: bytes) -> np.ndarray | None:
        return self.readable.get(shared)


class InlineRunner:
    """An engine without its thread: what a desk uses of a runner. Counts the releases of every reservation."""

    def __init__(self) -> None:
        self.engine = fake_engine(num_blocks=16, num_slots=8)
        self.releases: Counter[str] = Counter()

    async def reserve(self, ticket_id: str, *args: Any) -> Reservation:
        self.releases[ticket_id] = 0
        return self.engine.reserve(ticket_id, *args)

    def release(self, ticket_id: str) -> None:
        self.releases[ticket_id] += 1
        self.engine.release(ticket_id)


@dataclass(eq=False)
class Writer:
    """One incarnation of a prefill worker, as it truly is. `lent`: memory that decode may read, called `name`."""

    link: InprocLink
    process: ProcessId
    region: Region
    name: bytes
    lent: np.ndarray
    frozen: bool = False
    died_at: float | None = None  # in time that decode ran

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(self.link.address.peer, self.link.address.epoch, self.process.pack())


@dataclass(eq=False)
class Handover:
    """One handoff, as it truly is. `writing`: its writer may still write into the landing.

    Of its places the first `sent` were written and announced in `chunks` chunks. What decode took of them when it heard
    of it was all as sealed unless `damaged`, and is everything once `complete`. `untaken`: number, first place, count
    of each chunk that was lent and not taken. `must_write`: its writer was told that decode cannot read.
    """

    holding: Holding
    writer: Writer
    sealed: np.ndarray
    writing: bool = True
    sent: int = 0
    chunks: int = 0
    damaged: bool = False
    complete: bool = False
    generating: AsyncExitStack | None = None
    verified: bool = False
    ended: bool = False
    gave_up_at: float | None = None  # in time that decode ran
    untaken: list[tuple[int, int, int]] = field(default_factory=list)
    must_write: bool = False
    lends: bool = False  # something of it was

    @property
    def left(self) -> int:
        return len(self.places) - self.sent

    @property
    def over_since(self) -> float | None:
        """When its writer began its last write, at the latest."""
        known = [at for at in (self.gave_up_at, self.writer.died_at) if at is not None]
        return min(known, default=None)

    @property
    def places(self) -> list[Place]:
        return list(self.holding.handoff.places())

    def seal(self, place: Place) -> int:
        return digest(self.sealed[place.offset : place.offset + place.size])

    def chunk(self, count: int, lent: bytes = b"") -> Chunk:
        """The next `count` places: the landing has room for all of them, in their order."""
        places = self.places[self.sent : self.sent + count]
        base = self.holding.landing.offset if lent else 0
        rows = tuple((p.group, p.block, p.valid_entries, base + p.offset, p.size, self.seal(p)) for p in places)
        start, end = places[0].offset, places[-1].offset + places[-1].size
        last = self.sent + count == len(self.places)
        return Chunk(self.holding.ticket_id, self.chunks, Run(start, start, end), last, Extents.of(rows), lent=lent)

    def source(self, chunk: Chunk) -> np.ndarray:
        """Where the bytes of a chunk that was lent lie."""
        offset = self.holding.landing.offset
        return self.writer.lent[offset + chunk.run.start : offset + chunk.run.end]

    def receipt(self) -> Receipt:
        """An honest one."""
        ask = self.holding.ask
        extents = tuple(place.sealed(self.seal(place)) for place in self.places)
        names = (self.holding.ticket_id, ask.request_id, EPOCH, MODEL.revision, MODEL.layout.fingerprint)
        return Receipt(*names, len(ask.tokens), extents, 3, SamplingState(1, 1))


class HandoffMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.name = uuid4().hex
        self.clock, self.ran = FakeClock(), 0.0
        self.runner = InlineRunner()
        self.link = ReadingLink(f"{self.name}-decode", EPOCH)
        capacity = SLABS * SLAB_BYTES
        self.pool = LandingPool(self.link, capacity, SLAB_BYTES, retire_after_s=40.0, clock=self.clock)
        self.book, self.shadow = (TicketBook(EPOCH, LEASE_S, TICKETS, self.clock) for _ in range(2))
        self.gone: set[ProcessId] = set()
        wake = Wake(Deaths(lambda process: process in self.gone), self.clock)
        metrics = DecodeMetrics(Metrics("decode"))
        mint = lambda: f"t{len(self.handovers)}"  # noqa: E731
        limits = Limits(4096, handoff_s=0.001)
        self.desk = Desk(self.runner, self.link, self.pool, self.book, mint, metrics, limits, wake)  # type: ignore[arg-type]
        self.handovers: list[Handover] = []
        self.mail: list[Notice] = []
        self.writers: list[Writer] = []
        self.born = self.asked = 0
        self.draining = False
        for _ in range(2):
            self._born()

    def _run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return self.loop.run_until_complete(work)

    def _born(self) -> None:
        self.born += 1
        link = InprocLink(f"{self.name}-w{self.born % 2}", self.born)
        process = ProcessId("boot", "net", "pids", self.born, self.born)
        region, lent = link.register(np.zeros(SLABS * SLAB_BYTES, np.uint8)), np.zeros(SLABS * SLAB_BYTES, np.uint8)
        self.writers.append(Writer(link, process, region, b"memory of %d" % self.born, lent))
        self.link.readable[self.writers[-1].name] = lent

    def _able(self) -> list[Writer]:
        return [writer for writer in self.writers if writer.died_at is None and not writer.frozen]

    def _pick(self, pick: int, *, ended: bool = True) -> Handover | None:
        """One of the newest handovers: older ones are mostly over."""
        some = [one for one in self.handovers[-12:] if ended or not one.ended]
        return some[pick % len(some)] if some else None

    # --- what happens ----------------------------------------------------------------------------------------------

    @rule(tokens=st.integers(1, 40), pick=picks)
    def reserve(self, tokens: int, pick: int) -> None:
        able = self._able()
        if not able:
            return
        writer, blocked = able[pick % len(able)], self.pool.blocked
        self.asked += 1
        prompt = tuple(2 + (index * index + pick) % 40 for index in range(tokens))
        records = Records(MODEL.revision, MODEL.layout)
        ask = ReserveAsk(f"r{self.asked}", prompt, tokens + 4, b"", False, records, writer.incarnation, EPOCH)
        try:
            holding = self._run(self.desk.reserve(ask))
        except Unavailable:
            assert self.draining
            return
        except Exhausted:
            seen["refused while blocked"] += blocked
            return
        assert not self.draining and not blocked
        self.shadow.issue(holding.ticket_id, ask.request_id, writer.incarnation)
        size = holding.handoff.landing_bytes
        assert holding.landing.size == size
        sealed = np.random.default_rng(self.asked).integers(1, 256, size, dtype=np.uint8)
        self.handovers.append(Handover(holding, writer, sealed))

    @rule(pick=picks, part=st.floats(0, 1), spoilt=st.sampled_from([0, 0, 0, 1]))
    def write(self, pick: int, part: float, spoilt: int) -> None:
        """A writer that can, writes: perhaps long after the desk gave it up, perhaps other bytes than it sealed."""
        one = self._pick(pick)
        if one is None or not one.left or one.untaken:  # what was lent might have to be written before the last word
            return
        if one.writing and one.gave_up_at is None and one.writer in self._able():
            seen["late write"] += one.ended
            self._push(one, max(1, round(part * one.left)), spoilt)

    @rule(pick=picks, part=st.floats(0, 1), spoilt=st.sampled_from([0, 0, 0, 1]))
    def lend(self, pick: int, part: float, spoilt: int) -> None:
        """A writer of decode's host tells where its bytes are, and writes nothing."""
        one = self._pick(pick)
        if one is not None and one.writing and one.gave_up_at is None and one.writer in self._able() and one.left:
            self._lend(one, max(1, round(part * one.left)), spoilt)

    def _lend(self, one: Handover, count: int, spoilt: int) -> None:
        if one.must_write:
            return
        chunk = one.chunk(count, one.writer.name)
        source = one.source(chunk)
        source[:] = one.sealed[chunk.run.start : chunk.run.end]
        source[0] ^= spoilt
        one.untaken.append((one.chunks, one.sent, count))
        one.sent, one.chunks, one.lends = one.sent + count, one.chunks + 1, True
        self._post(one, chunk.pack())

    @rule(pick=picks)
    def what_was_lent_changes(self, pick: int) -> None:
        """Its writer gave up and computes another prompt there, or lies."""
        one = self._pick(pick)
        if one is not None and one.writer.died_at is None and (one.untaken or not one.writing):
            offset = one.holding.landing.offset
            one.writer.lent[offset : offset + one.holding.landing.size] = 0xDD

    @rule(pick=picks)
    def memory_cannot_be_read_any_more(self, pick: int) -> None:
        self.link.readable.pop(self.writers[-1 - pick % 2].name, None)

    @rule(pick=picks)
    def sign_of_life(self, pick: int) -> None:
        """A writer that computes has nothing to write yet."""
        one = self._pick(pick)
        if one is not None and one.writing and one.gave_up_at is None and one.writer in self._able():
            self._post(one, Alive(one.holding.ticket_id).pack())

    @rule(pick=picks)
    def gives_up(self, pick: int) -> None:
        """The writer says that it writes no more, before it wrote everything."""
        one = self._pick(pick)
        if one is not None and one.writing and one.gave_up_at is None and one.writer in self._able():
            self._post(one, GaveUp(one.holding.ticket_id).pack())
            one.writing = False

    @rule(pick=picks)
    def a_push_runs_out_of_time(self, pick: int) -> None:
        """The writer starts no other; what it gave up may land for a while, as of one that died."""
        one = self._pick(pick)
        if one is not None and one.writing and one.gave_up_at is None and one.writer in self._able():
            one.gave_up_at = self.ran
            self._post(one, Trailing(one.holding.ticket_id).pack())

    def _post(self, one: Handover, payload: bytes) -> None:
        self.mail.append(Notice(one.writer.link.address.peer, one.writer.link.address.epoch, payload))

    def _push(self, one: Handover, count: int, spoilt: int) -> None:
        """The next `count` places, and word of them."""
        chunk, memory = one.chunk(count), one.writer.region.memory
        start, end = chunk.run.start, chunk.run.end
        memory[start:end] = one.sealed[start:end]
        memory[start] ^= spoilt
        at, sizes = np.array([start]), np.array([end - start])
        writes = [plan.write_to(one.holding.landing, one.writer.region, at, at, sizes)]
        self._run(one.writer.link.push(self.link.address, writes, notify=chunk.pack(), timeout_s=5.0))
        self.mail += self.link._inbox._notices
        self.link._inbox._notices.clear()
        seen["written since it could not be read"] += one.must_write
        one.sent, one.chunks, one.writing = one.sent + count, one.chunks + 1, not chunk.last

    @initialize(
        pick=picks,
        spoilt=st.sampled_from([0, 1]),
        missing=st.sampled_from([0, 0, 0, 1]),
        killed=st.booleans(),
        full=st.booleans(),
        hidden=st.sampled_from([False, False, True]),
    )
    def crowd(self, pick: int, spoilt: int, missing: int, killed: bool, full: bool, hidden: bool) -> None:
        """One that generates, and some that were given up while their writers may write on: up to the cap."""
        self.reserve(20, pick)
        if hidden:
            self.link.readable.clear()
        self.the_newest_is_handed_over(spoilt, missing, lends=hidden or pick % 2 == 1)
        for tokens in (9, 30, 40) if full else (9, 30):
            self.reserve(tokens, pick)
            self.release(len(self.handovers) - 1, known=False)
        if full:
            self.reserve(5, pick)
        if killed:
            self.kill(pick)

    @rule(spoilt=st.sampled_from([0, 1]), missing=st.sampled_from([0, 0, 0, 1]), lends=st.booleans())
    def the_newest_is_handed_over(self, spoilt: int, missing: int, lends: bool) -> None:
        """The usual way in one step, so that the rest of the machine meets running generations often enough."""
        if not self.handovers:
            return
        one = self.handovers[-1]
        if one.writing and one.gave_up_at is None and one.writer in self._able():
            self._deliver(len(self.mail))  # what was lent before is taken, or has to be written
            for send in (self._lend, self._push) if lends else (self._push,):  # written is what could not be read
                if one.left > missing and one.writing and not one.untaken:
                    send(one, one.left - missing, spoilt)
                    self._deliver(len(self.mail))
            self._claim(one)
            self._verify(one)

    @precondition(lambda self: self.mail)
    @rule(count=st.integers(1, 4))
    def deliver(self, count: int) -> None:
        """Notices arrive: late, and in their order."""
        self._deliver(count)

    def _deliver(self, count: int) -> None:
        for notice in self.mail[:count]:
            self._notice(notice)
        del self.mail[:count]

    def _notice(self, notice: Notice) -> None:
        told, sender = messages.unpack(notice.payload), Incarnation(notice.peer, notice.epoch)
        taken = False
        if isinstance(told, Chunk):
            one = self.handovers[int(told.transfer[1:])]
            taken = self._witness_lent(one, told) if told.lent else self._witness(one, told)
        self._run(self._heard(notice))
        if isinstance(told, Trailing):
            self.shadow.trails(told.transfer, sender)
        else:
            done = isinstance(told, GaveUp) or (isinstance(told, Chunk) and told.last and (taken or not told.lent))
            self.shadow.arrived(told.transfer, done, sender)

    async def _heard(self, notice: Notice) -> None:
        """The desk hears it, and copies to the end what it copies."""
        self.desk.noticed(notice)
        copying = [transfer.committing for transfer in self.desk._intake._open.values()]
        await asyncio.gather(*filter(None, copying))

    def _witness_lent(self, one: Handover, chunk: Chunk) -> bool:
        """Looks at what was lent as decode is about to do; whether it takes it. Where it cannot be read, the writer is
        told to write that and all that it lent since."""
        transfer = self.desk._intake._open.get(chunk.transfer)
        if transfer is None or transfer.over.is_set() or transfer.ring.seen(chunk.number):
            return False
        if transfer.must_write or chunk.lent not in self.link.readable:
            one.must_write = True
            for number, first, _ in one.untaken[:1]:
                one.sent, one.chunks = first, number
            one.untaken.clear()
            return False
        damaged = not (one.source(chunk) == one.sealed[chunk.run.start : chunk.run.end]).all()
        seen["damage found in what was lent"] += damaged
        one.damaged |= damaged
        one.complete = chunk.last
        if not damaged:
            one.untaken.pop(0)
            one.writing &= not chunk.last
        return not damaged

    def _witness(self, one: Handover, chunk: Chunk) -> bool:
        """Looks at the landing as decode is about to do, if it still does."""
        transfer = self.desk._intake._open.get(chunk.transfer)
        if transfer is None or transfer.over.is_set():
            return False
        landing, start, end = one.holding.landing, chunk.run.start, chunk.run.end
        arrived = self.pool._memory[landing.offset :][start:end]
        one.damaged |= not (arrived == one.sealed[start:end]).all()
        one.complete = chunk.last
        return True

    @rule(pick=picks, last=st.booleans(), epoch=st.sampled_from([0, 1]))
    def foreign_notice(self, pick: int, last: bool, epoch: int) -> None:
        """Another worker, or an older incarnation of the same, speaks for a ticket."""
        one = self._pick(pick)
        if one is not None:
            before = self._states()
            writer = one.writer.link.address
            peer = f"{self.name}-other" if epoch else writer.peer
            payload = (GaveUp if last else Alive)(one.holding.ticket_id).pack()
            self.desk.noticed(Notice(peer, writer.epoch - 1 + epoch, payload))
            assert self._states() == before

    @rule(pick=picks)
    def claim(self, pick: int) -> None:
        one = self._pick(pick)
        if one is not None:
            self._claim(one)

    def _claim(self, one: Handover) -> None:
        ticket, request = one.holding.ticket_id, one.holding.ask.request_id
        stack = AsyncExitStack()
        try:
            held = self._run(stack.enter_async_context(self.desk.serving(ticket, request, EPOCH)))
        except StaleTicket:
            with pytest.raises(StaleTicket):
                self.shadow.claim(ticket, request, EPOCH)
            return
        assert held is one.holding and one.generating is None and not one.ended
        self.shadow.claim(ticket, request, EPOCH)
        one.generating = stack

    @rule(pick=picks)
    def verify(self, pick: int) -> None:
        """With a receipt, before or after everything was written: verified exactly if all arrived, and as sealed."""
        one = self._pick(pick, ended=False)
        if one is not None:
            self._verify(one)

    def _verify(self, one: Handover) -> None:
        if one.generating is None or one.verified:
            return
        try:
            self._run(self.desk.verify(one.holding, one.receipt()))
        except (DataLoss, Cancelled, DeadlineExceeded) as error:
            assert one.damaged or not one.complete
            seen["damage found" if one.damaged else "refused before all was there"] += 1
            assert isinstance(error, DataLoss) or not one.damaged
            self._end(one)
            return
        assert one.complete and not one.damaged
        seen["verified what was lent" if one.lends and not one.must_write else "verified"] += 1
        self.shadow.complete(one.holding.ticket_id)
        one.verified = True

    @rule(pick=picks)
    def forged_receipt(self, pick: int) -> None:
        """A receipt that names other bytes than were sealed: nothing is decoded from what it says."""
        one = self._pick(pick, ended=False)
        if one is None or one.generating is None or one.verified:
            return
        honest = one.receipt()
        forged = replace(honest.extents[0], digest=honest.extents[0].digest ^ 1)
        with pytest.raises((DataLoss, Cancelled, DeadlineExceeded)):
            self._run(self.desk.verify(one.holding, replace(honest, extents=(forged, *honest.extents[1:]))))
        self._end(one)

    @rule(pick=picks)
    def generation_ends(self, pick: int) -> None:
        one = self._pick(pick, ended=False)
        if one is not None and one.generating is not None:
            self._end(one)

    def _end(self, one: Handover) -> None:
        assert one.generating is not None
        self._run(one.generating.aclose())
        self.shadow.close(one.holding.ticket_id, WriterState.UNKNOWN)
        one.generating, one.ended = None, True

    @rule(pick=picks, known=st.booleans())
    def release(self, pick: int, known: bool) -> None:
        """By the gateway, at any time, repeatedly. It says that a writer has finished only where it has.

        A running generation is ended by its own call.
        """
        one = self._pick(pick)
        if one is None or one.generating is not None:
            return
        writer = WriterState.FINISHED if known and not one.writing else WriterState.UNKNOWN
        seen["released again"] += one.ended
        released = self.desk.release(one.holding.ticket_id, writer, EPOCH)
        assert released == (self.shadow.close(one.holding.ticket_id, writer) is not None)
        one.ended = True

    @rule(pick=picks)
    def another_epoch(self, pick: int) -> None:
        one = self._pick(pick)
        if one is None:
            return
        before, ask = self._states(), one.holding.ask
        with pytest.raises(StaleTicket):
            self.desk.release(one.holding.ticket_id, WriterState.FINISHED, EPOCH - 1)
        with pytest.raises(StaleTicket):
            self._run(self.desk.serving(one.holding.ticket_id, ask.request_id, EPOCH - 1).__aenter__())
        stale = ReserveAsk("x", ask.tokens, 99, b"", False, ask.records, epoch=EPOCH - 1)
        with pytest.raises(StaleTicket):
            self._run(self.desk.reserve(stale))
        assert self._states() == before

    @rule(seconds=st.sampled_from([0.2, 0.5, 0.5, 1.0, 1.0, 5.0, 19.0, 31.0, 90.0]))
    def time_passes(self, seconds: float) -> None:
        """Of a jump only a part counts as time in which decode ran and took bytes from sockets."""
        self.clock.advance(seconds)
        self.ran += min(seconds, LONGEST_STEP_S)
        self.desk.sweep()
        for ticket in self.shadow.sweep():
            self.handovers[int(ticket.id[1:])].ended = True
        for one in self.handovers:
            if one.over_since is not None and self.ran - one.over_since >= LINGER_S:
                one.writing = False
        for ticket_id in self.shadow._live.keys() - self.book._live.keys():
            one = self.handovers[int(ticket_id[1:])]
            assert one.gave_up_at is not None or one.writer.process in self.gone
            seen["freed by death" if one.gave_up_at is None else "freed after a push ran out of time"] += 1
            self.shadow.close(ticket_id, WriterState.DEAD)

    @rule(pick=picks)
    def freeze_or_wake(self, pick: int) -> None:
        writer = self.writers[-1 - pick % 2]
        writer.frozen = not writer.frozen

    @rule(pick=picks)
    def kill(self, pick: int) -> None:
        """SIGKILL, and a successor. What the dead had under way may land for a while."""
        alive = [writer for writer in self.writers if writer.died_at is None]
        writer = alive[pick % len(alive)]
        writer.died_at = self.ran
        self.link.readable.pop(writer.name, None)
        self.gone.add(writer.process)
        self._born()

    @rule(pick=picks)
    def late_bytes_land(self, pick: int) -> None:
        one = self._pick(pick)
        if one is not None and one.writing and one.over_since is not None:
            landing = one.holding.landing
            self.pool._memory[landing.offset : landing.offset + landing.size] = 0xDE

    @precondition(lambda self: self.asked > 6)
    @rule()
    def drain(self) -> None:
        self.desk.drain()
        self.draining = True
        self.reserve(8, 0)

    # --- what holds after every step -------------------------------------------------------------------------------

    def _states(self) -> dict[str, tuple[str, float]]:
        return {ticket.id: (ticket.state, ticket.expires_at) for ticket in self.book._live.values()}

    @invariant()
    def desk_and_book_agree(self) -> None:
        shadow = {ticket.id: (ticket.state, ticket.expires_at) for ticket in self.shadow._live.values()}
        assert self._states() == shadow
        assert self.desk.open <= TICKETS

    @invariant()
    def memory_is_conserved(self) -> None:
        stats = self.runner.engine.stats()
        assert stats.blocks_free + stats.blocks_cached + stats.blocks_held == stats.blocks_total
        assert stats.reserved == len(self.desk._holdings) == self.desk.open
        assert sum(self.pool._book.count().values()) == SLABS
        assert bool(self.desk.unfit) == self.pool.blocked

    @invariant()
    def no_slab_is_given_away_while_its_writer_may_write(self) -> None:
        for one in self.handovers:
            if one.writing:
                grant = self.pool._book.find(one.holding.ticket_id)
                assert grant is not None and grant.first * SLAB_BYTES == one.holding.landing.offset
                assert not any(self.pool._book._free[grant.first : grant.first + grant.count])

    @invariant()
    def what_was_verified_stays_as_it_was_sealed(self) -> None:
        for one in self.handovers:
            if one.generating is not None and one.verified:
                kept = one.holding.reservation
                kv = HeldKV(kept.blocks, kept.slot, len(one.holding.ask.tokens))
                for place in one.holding.handoff.places():
                    live = extent_view(self.runner.engine.pool, place.group, place.block, kv)
                    assert (live == one.sealed[place.offset : place.offset + place.size]).all()

    @invariant()
    def every_holding_leaves_once(self) -> None:
        for one in self.handovers:
            ticket = one.holding.ticket_id
            assert self.runner.releases[ticket] == (ticket not in self.desk._holdings)

    def teardown(self) -> None:
        """Calls end, writers die, time passes: nothing is held."""
        for one in self.handovers:
            if one.generating is not None:
                self._end(one)
        for writer in self.writers:
            self.gone.add(writer.process)
            writer.died_at = self.ran if writer.died_at is None else writer.died_at
        self.time_passes(LEASE_S)
        for _ in range(8):
            self.time_passes(0.5)
        stats = self.runner.engine.stats()
        assert (stats.blocks_held, stats.slots_held, stats.reserved) == (0, 0, 0)
        assert self.pool._book.count()[SlabState.FREE] == SLABS
        assert not self.pool._expecting and len(self.book) == 0 and not self.desk.unfit
        self._run(self.desk.close())
        for link in (self.link, *(writer.link for writer in self.writers)):
            self._run(link.close())
        self.loop.close()


def test_whatever_writers_do_nothing_is_corrupted_leaked_or_given_twice() -> None:
    seen.clear()
    gc.collect()  # Python 3.11 cannot parse source (as hypothesis does) while other tests' tasks are collected
    run_state_machine_as_test(HandoffMachine, settings=settings(max_examples=250, stateful_step_count=50))
    assert all(seen[what] for what in MUST_SEE), seen


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_same_for_minutes() -> None:
    run_state_machine_as_test(HandoffMachine, settings=settings(max_examples=1500, stateful_step_count=120))
