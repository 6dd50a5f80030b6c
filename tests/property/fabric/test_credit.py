"""Credit is a bound, delivery is once and in order, turns are fair; whatever the order of messages and the ending."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fabric.errors import InvalidArgument
from fabric.kvlink.credit import MAX_EARLY, FairQueue, Flow, ReceiveRing, Run, SendRing, Turn, cut

RING = 64
SEEDS = st.integers(0, 2**32 - 1)


class Wire:
    """One transfer with a network between its halves that reorders, repeats and delays."""

    def __init__(self, sizes: list[int], rng: random.Random) -> None:
        self.sender, self.receiver, self.rng = SendRing(RING), ReceiveRing(RING), rng
        self.unsent = list(enumerate(sizes))
        self.owner: list[int | None] = [None] * RING  # whose bytes a live part of the ring has
        self.notices: list[tuple[int, Run]] = []
        self.to_take: list[tuple[int, Run]] = []
        self.credits: list[int] = []
        self.delivered: list[int] = []

    def steps(self) -> list[str]:
        possible = {"place": self.unsent, "notice": self.notices, "take": self.to_take, "credit": self.credits}
        return [name for name, work in possible.items() if work]

    def place(self) -> bool:
        number, size = self.unsent[0]
        run = self.sender.place(size)
        if run is None:
            return False
        self.unsent.pop(0)
        place = range(run.offset, run.offset + size)
        assert all(self.owner[at] is None for at in place), "bytes that are not taken out were overwritten"
        for at in place:
            self.owner[at] = number
        self.notices.append((number, run))
        assert self.sender.in_flight <= RING
        return True

    def notice(self) -> bool:
        at = self.rng.randrange(len(self.notices))
        number, run = self.notices[at]
        if self.rng.random() < 0.8:  # else it comes again later
            self.notices.pop(at)
        self.to_take += self.receiver.arrived(number, run)
        return True

    def take(self) -> bool:
        number, run = self.to_take.pop(0)
        for at in range(run.offset, run.offset + run.end - run.start):
            assert self.owner[at] == number
            self.owner[at] = None
        self.receiver.took(run)
        self.delivered.append(number)
        self.credits.append(self.receiver.taken_out)
        return True

    def credit(self) -> bool:
        at = self.rng.randrange(len(self.credits))
        position = self.credits.pop(at)
        if self.rng.random() < 0.3 and position < self.receiver.taken_out:
            return True  # lost; the newest never is, or the transfer ends by its deadline
        self.sender.credit(position)
        return True


@given(st.lists(st.integers(1, RING), max_size=60), SEEDS)
def test_chunks_of_any_size_arrive_once_in_order_and_never_more_than_the_ring_is_in_flight(sizes, seed):
    wire = Wire(sizes, random.Random(seed))
    stuck = 0
    while steps := wire.steps():
        moved = getattr(wire, wire.rng.choice(steps))()
        stuck = 0 if moved else stuck + 1
        if stuck > 200:  # every message arrived and still no credit
            assert steps != ["place"], "the sender waits for ever"
    assert wire.delivered == list(range(len(sizes)))
    wire.sender.credit(wire.receiver.taken_out)
    assert wire.sender.in_flight == 0
    assert wire.owner == [None] * RING


def test_a_late_smaller_credit_takes_nothing_back_and_one_for_the_future_is_refused():
    ring = SendRing(RING)
    first, second = ring.place(30), ring.place(30)
    ring.credit(second.end)
    ring.credit(first.end)
    assert ring.in_flight == 0
    with pytest.raises(InvalidArgument):
        ring.credit(second.end + 1)
    with pytest.raises(InvalidArgument):
        ring.place(RING + 1)


@pytest.mark.parametrize(
    "run",
    [Run(0, 0, RING + 1), Run(1, 0, 5), Run(60, 60, 66), Run(-1, -1, 5), Run(0, 5, 4), Run(0, 1 << 63, 1 << 64)],
)
def test_a_chunk_outside_its_ring_is_refused(run):
    with pytest.raises(InvalidArgument):
        ReceiveRing(RING).arrived(0, run)


def test_a_writer_without_credit_is_refused():
    ring = ReceiveRing(RING)
    assert ring.arrived(0, Run(0, 0, 40)) == [(0, Run(0, 0, 40))]
    with pytest.raises(InvalidArgument, match="without credit"):
        ring.arrived(1, Run(0, RING, RING + 10))
    with pytest.raises(InvalidArgument):
        ring.arrived(1 + MAX_EARLY, Run(0, RING, RING + 10))


class Backlog:
    """Transfers whose chunks all wait from the start, through one queue: one that joins later has no claim to the time
    before."""

    def __init__(self, chunks: list[list[int]], limit: int) -> None:
        self.queue, self.chunks = FairQueue(limit), [list(sizes) for sizes in chunks]
        self.owner: dict[Turn, int] = {}
        self.sent: Counter[int] = Counter()
        self.running: list[Turn] = []
        for index, sizes in enumerate(chunks):
            flow = Flow()
            self.owner |= {self.queue.join(flow, size): index for size in sizes}

    def admit(self) -> None:
        while begun := self.queue.admit():
            for turn in begun:
                index = self.owner[turn]
                self.sent[index] += turn.size
                self.running.append(turn)
                self.chunks[index].pop()

    def finish(self, rng: random.Random) -> None:
        turn = self.running.pop(rng.randrange(len(self.running)))
        self.queue.leave(turn)
        self.queue.leave(turn)


CHUNKS = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=30), min_size=2, max_size=6)


@given(CHUNKS, st.integers(1, 100), SEEDS)
@example([[1, 3, 5, 1, 1], [1, 1, 1, 1], [5, 1]], 5, 0)
def test_no_transfer_is_overtaken_by_more_than_a_chunk_of_each(chunks, limit, seed):
    backlog, rng = Backlog(chunks, limit), random.Random(seed)
    backlog.admit()
    while backlog.running:
        assert backlog.queue.in_flight == sum(turn.size for turn in backlog.running)
        assert backlog.queue.in_flight <= limit or len(backlog.running) == 1  # a chunk above the limit goes alone
        waiting = [index for index, left in enumerate(backlog.chunks) if left]
        for one in waiting:
            for other in waiting:
                gap = backlog.sent[one] - backlog.sent[other]
                assert gap <= max(chunks[one]) + max(chunks[other])
        backlog.finish(rng)
        backlog.admit()
    assert [backlog.sent[index] for index in range(len(chunks))] == [sum(sizes) for sizes in chunks]
    assert backlog.queue.in_flight == 0


@given(st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=1, max_size=40), SEEDS)
def test_turns_given_up_in_any_state_leave_nothing_in_flight(turns, seed):
    queue, rng = FairQueue(20), random.Random(seed)
    joined = [(queue.join(Flow(), size), stays) for size, stays in turns]
    for turn, stays in joined:
        if not stays:
            queue.leave(turn)
    ran = []
    while begun := queue.admit():
        ran += begun
        rng.shuffle(begun)
        for turn in begun:
            queue.leave(turn)
    assert set(ran) == {turn for turn, stays in joined if stays}
    assert queue.in_flight == 0


@given(st.lists(st.integers(0, 30), max_size=50), st.integers(1, 60))
def test_chunks_cover_every_extent_once_and_are_full_but_not_over(sizes, chunk_bytes):
    chunks = cut(sizes, chunk_bytes)
    assert [index for first, end in chunks for index in range(first, end)] == list(range(len(sizes)))
    for first, end in chunks:
        assert end > first
        assert end == first + 1 or sum(sizes[first:end]) <= chunk_bytes
    for (first, end), _ in itertools.pairwise(chunks):
        assert sum(sizes[first : end + 1]) > chunk_bytes


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 100), st.booleans()), max_size=60))
def test_a_chunk_that_passed_counts_as_one_that_had_its_turn(sent):
    """The same chunks, one at a time: by turns in one queue, past it in the other where it has room."""
    turning, passing = FairQueue(100), FairQueue(100)
    flows = [(Flow(), Flow()) for _ in range(3)]
    for number, size, passes in sent:
        one, other = flows[number]
        turn = turning.join(one, size)
        assert turning.admit() == [turn]
        turning.leave(turn)
        if passes:
            assert passing.has_room(size)
            passing.passed(other, size)
        else:
            turn = passing.join(other, size)
            assert passing.admit() == [turn]
            passing.leave(turn)
        assert one.finish == other.finish


def test_nobody_passes_one_who_waits():
    queue, flow = FairQueue(100), Flow()
    first, second = queue.join(flow, 80), queue.join(flow, 80)
    assert queue.admit() == [first]
    assert not queue.has_room(1)
    queue.leave(first)
    assert queue.admit() == [second]
    assert queue.has_room(20) and not queue.has_room(21)
