"""Credit: how much of a transfer may be in flight, where it lies, and whose turn it is. Pure: no memory, no network.

A landing is a ring. Positions count bytes from the start of a transfer and only grow; position p lies at p modulo the
ring's size. What the receiver has taken out is one number, so a credit that is lost or late does no harm: the next one
says more.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fabric.errors import InvalidArgument

MAX_EARLY = 1024  # chunks that came before one that they follow


@dataclass(frozen=True, slots=True)
class Run:
    """Contiguous ring bytes of one chunk: `offset` in the landing, and positions [start, end) of the transfer."""

    offset: int
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


class SendRing:
    """The writer's half: hands out places for chunks as far as credit goes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._head = 0
        self._taken_out = 0

    @property
    def written(self) -> int:
        """Position up to which places were handed out."""
        return self._head

    @property
    def in_flight(self) -> int:
        """Bytes placed and not yet credited, skipped ends of the ring included."""
        return self._head - self._taken_out

    def place(self, size: int) -> Run | None:
        """The next place for a chunk of `size` bytes, or None until more is credited.

        Raises:
            InvalidArgument: it can never fit.
        """
        self.require_fits(size)
        start = self._head
        offset = start % self.nbytes
        if offset + size > self.nbytes:  # a chunk is contiguous
            start, offset = start + self.nbytes - offset, 0
        floor = start if self._taken_out == self._head else self._taken_out
        if start + size - floor > self.nbytes:
            return None
        self._taken_out, self._head = floor, start + size
        return Run(offset, start, start + size)

    def require_fits(self, size: int) -> None:
        """Raises InvalidArgument where a chunk of `size` bytes can never find a place."""
        if not 0 <= size <= self.nbytes:
            raise InvalidArgument(f"a chunk of {size} bytes for a landing of {self.nbytes}", field="landing")

    def credit(self, position: int) -> None:
        """Everything before `position` was taken out.

        Raises:
            InvalidArgument: nothing was placed there yet.
        """
        if position > self._head:
            raise InvalidArgument(f"credit up to {position}, written up to {self._head}", field="credit")
        self._taken_out = max(self._taken_out, position)


class ReceiveRing:
    """The reader's half: takes chunks in the order of their numbers, each once, and believes no writer."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.taken_out = 0  # the credit to return
        self.taken = 0  # chunks that are in place
        self._next = 0
        self._end = 0
        self._early: dict[int, Run] = {}

    def seen(self, number: int) -> bool:
        """Whether chunk `number` arrived before."""
        return number < self._next or number in self._early

    def arrived(self, number: int, run: Run) -> list[tuple[int, Run]]:
        """Chunk `number` is complete in `run`: the chunks that are next in order now; none for one that came before.

        Raises:
            InvalidArgument: a chunk leaves the ring, or its writer had no credit for it.
        """
        if self.seen(number):
            return []
        if not self._is_inside(run) or number >= self._next + MAX_EARLY:
            raise InvalidArgument(f"chunk {number} does not fit its landing of {self.nbytes} bytes", field="chunk")
        self._early[number] = run
        found = []
        while (following := self._early.pop(self._next, None)) is not None:
            if following.size:  # else it has no place, and may come with any position
                self._require_credit(following)
                self._end = following.end
            found.append((self._next, following))
            self._next += 1
        return found

    def forget(self, number: int) -> None:
        """Chunk `number`, which came early, is to come again."""
        self._early.pop(number, None)

    def took(self, run: Run) -> None:
        """The chunk's bytes are in place: its part of the ring may be written again."""
        if run.size:
            self.taken_out = max(self.taken_out, run.end)
        self.taken += 1

    def _require_credit(self, run: Run) -> None:
        if self.taken_out == self._end <= run.start:
            self.taken_out = run.start  # nothing lies before it
        if run.start < self._end or run.end - self.taken_out > self.nbytes:
            raise InvalidArgument(f"chunk {self._next} was written without credit", field="chunk")

    def _is_inside(self, run: Run) -> bool:
        size = run.end - run.start
        return 0 <= size <= self.nbytes - run.offset and run.offset >= 0 and run.offset == run.start % self.nbytes


@dataclass(slots=True, eq=False)
class Flow:
    """What one transfer has sent, as its queue counts it."""

    finish: int = 0


@dataclass(slots=True, eq=False)
class Turn:
    """One chunk that waits for its turn or is in flight."""

    size: int
    tag: int
    state: Literal["waiting", "running", "over"] = "waiting"


class FairQueue:
    """Bytes in flight of many transfers, divided fairly. A chunk larger than the limit goes alone.

    Start-time fair queueing (Goyal, Vin, Cheng 1996): over any time in which two transfers have chunks waiting, the
    bytes they were let send differ by no more than one chunk of each.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = 0
        self._now = 0  # tag of the newest turn that began
        self._serial = 0
        self._waiting: list[tuple[int, int, Turn]] = []

    def join(self, flow: Flow, size: int) -> Turn:
        """Queues a chunk. Pair with `leave`."""
        turn = Turn(size, max(self._now, flow.finish))
        flow.finish = turn.tag + size
        self._serial += 1
        heapq.heappush(self._waiting, (turn.tag, self._serial, turn))
        return turn

    def has_room(self, size: int) -> bool:
        """Whether a chunk that is sent before anything else happens needs no turn: then say that it `passed`."""
        return not self._waiting and (not self.in_flight or self.in_flight + size <= self.limit)

    def passed(self, flow: Flow, size: int) -> None:
        """A chunk was sent without a turn; it counts as one that had it."""
        self._now = max(self._now, flow.finish)
        flow.finish = self._now + size

    def admit(self) -> list[Turn]:
        """The turns that begin now. One that finds no room is not overtaken."""
        begun = []
        while self._waiting:
            turn = self._waiting[0][2]
            if turn.state == "waiting":
                if self.in_flight and self.in_flight + turn.size > self.limit:
                    break
                turn.state = "running"
                self.in_flight += turn.size
                self._now = turn.tag
                begun.append(turn)
            heapq.heappop(self._waiting)
        return begun

    def leave(self, turn: Turn) -> None:
        """Ends a turn, whether it ran or not; safe to repeat."""
        if turn.state == "running":
            self.in_flight -= turn.size
        turn.state = "over"


def cut(sizes: NDArray[np.int64], chunk_bytes: int) -> list[tuple[int, int]]:
    """Chunks [first, end) of consecutive extents: each as many as fit `chunk_bytes`, and at least one."""
    ends = np.cumsum(sizes)
    chunks, first, before = [], 0, 0
    while first < len(ends):
        end = max(first + 1, int(np.searchsorted(ends, before + chunk_bytes, "right")))
        chunks.append((first, end))
        first, before = end, int(ends[end - 1])
    return chunks
