"""Scheduler: which tokens of which sequences the next step computes. Knows ids and counts; knows no tensors.

One class for prefill and decode; a policy holds what differs. Sequences have a static total order (`rank`): it decides
admission, the share of a step's token budget and who is preempted, so the first in order always advances and every
sequence becomes first after finitely many others.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import Exhausted
from engine.memory import KVMemory
from engine.sequence import Phase, Role, Sequence


@dataclass(frozen=True, slots=True)
class SchedulerPolicy:
    """Bounds of one engine. `max_batch_tokens` exceeds `max_sequences`, so prefill advances beside any decodes."""

    max_batch_tokens: int
    max_sequences: int
    max_waiting: int
    anchor_every_blocks: int

    def __post_init__(self) -> None:
        if min(self.max_sequences, self.max_waiting, self.anchor_every_blocks) < 1:
            raise ValueError("scheduler policy: every bound must be at least 1")
        if self.max_batch_tokens <= self.max_sequences:
            raise ValueError("scheduler policy: max_batch_tokens must exceed max_sequences")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start..start+count` of one sequence, to be computed in the next step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        """Tokens computed once the chunk is."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Restore:
    """Copy this anchor slot into the sequence's slot before the step, then report it with `Scheduler.restored`."""

    sequence: Sequence
    anchor_slot: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: anchors to restore, chunks to compute, and the sequences that were preempted for it."""

    restores: tuple[Restore, ...]
    chunks: tuple[Chunk, ...]
    preempted: tuple[Sequence, ...]


class Scheduler:
    """Owns the waiting and the running sequences; `clock` returns seconds and only feeds statistics."""

    def __init__(self, policy: SchedulerPolicy, memory: KVMemory, clock: Callable[[], float]) -> None:
        self._policy, self._memory, self._clock = policy, memory, clock
        self._waiting: list[Sequence] = []  # both sorted by rank
        self._running: list[Sequence] = []

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences without memory."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences with memory that are computed step by step."""
        return tuple(self._running)

    @property
    def queued_tokens(self) -> int:
        """Tokens still to be computed before every sequence decodes."""
        return sum(sequence.pending_tokens for sequence in (*self._waiting, *self._running))

    @property
    def oldest_wait_s(self) -> float:
        """Age of the longest waiting sequence."""
        arrivals = [sequence.arrived_s for sequence in self._waiting]
        return self._clock() - min(arrivals) if arrivals else 0.0

    @property
    def has_work(self) -> bool:
        """Whether a sequence that is not paused waits or runs."""
        return any(not sequence.paused for sequence in (*self._running, *self._waiting))

    def can_add(self) -> bool:
        """Whether the queue has room."""
        return len(self._waiting) < self._policy.max_waiting

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises Exhausted if the queue is full."""
        if not self.can_add():
            raise Exhausted("queue places", needed=1, free=0)
        self._enqueue(sequence)

    def start(self, sequence: Sequence) -> None:
        """Run a sequence whose memory is already taken and filled."""
        sequence.phase = Phase.RUNNING
        bisect.insort(self._running, sequence, key=_rank)

    def remove(self, sequence: Sequence, phase: Phase) -> None:
        """Take a sequence out, into phase HELD (it keeps its memory) or ENDED (its memory is given back)."""
        queue = self._waiting if sequence.phase is Phase.WAITING else self._running
        if sequence.phase in (Phase.WAITING, Phase.RUNNING):
            queue.remove(sequence)
        sequence.phase = phase
        if phase is Phase.ENDED:
            self._give_back(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's memory; it will be computed again from its tokens."""
        self._running.remove(sequence)
        self._give_back(sequence)
        self._enqueue(sequence)

    def restored(self, restore: Restore) -> None:
        """The anchor was copied. A prefill request goes on holding it, for its receipt's sake; others let go."""
        if restore.sequence.role is Role.PREFILL:
            restore.sequence.anchor_slot = restore.anchor_slot
            restore.sequence.anchor_tokens = restore.sequence.computed_tokens
        else:
            self._memory.give((), (restore.anchor_slot,))

    def goes_on(self, plan: Plan) -> bool:
        """Whether the step after `plan` most likely has the same sequences, each with the token that is chosen now."""
        return not self._waiting and all(chunk.sequence.goes_on for chunk in plan.chunks)

    def plan(self) -> Plan:
        """The next step: running decodes first, then running prefills, then admissions, all in rank order."""
        alone = self._plan_alone()
        if alone is not None:
            return alone
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        for sequence in [one for one in self._running if one.decoding and not one.paused]:
            if sequence.phase is Phase.RUNNING and self._can_grow(sequence, preempted):
                chunks.append(Chunk(sequence, sequence.computed_tokens, 1))
        budget = self._policy.max_batch_tokens - len(chunks)
        for sequence in self._running:
            if budget and not sequence.decoding and not sequence.paused:
                chunks.append(self._chunk(sequence, budget))
                budget -= chunks[-1].count
        restores: list[Restore] = []
        if not preempted:
            self._admit(chunks, restores, preempted, budget)
        return Plan(tuple(restores), tuple(chunks), tuple(preempted))

    def _plan_alone(self) -> Plan | None:
        """A step for a single suspect, running or next to be admitted; None if there is none or it does not fit yet."""
        restores: list[Restore] = []
        preempted: list[Sequence] = []
        suspect = next((one for one in self._running if one.suspect and not one.paused), None)
        head = next((one for one in self._waiting if not one.paused), None)
        if suspect is None and head is not None and head.suspect and self._take(head, restores):
            self._waiting.remove(head)
            self.start(head)
            suspect = head
        if suspect is None:
            return None
        if suspect.decoding and not self._can_grow(suspect, preempted):
            return Plan((), (), tuple(preempted))
        return Plan(tuple(restores), (self._chunk(suspect, self._policy.max_batch_tokens),), tuple(preempted))

    def _admit(self, chunks: list[Chunk], restores: list[Restore], preempted: list[Sequence], budget: int) -> None:
        """Start waiting sequences in order; the first that does not fit keeps the rest waiting: nobody overtakes it.

        A paused sequence loses its memory to one that waits: a slow reader may cost itself time, never others.
        """
        for sequence in [one for one in self._waiting if not one.paused]:
            if not budget or sequence.suspect or len(self._running) >= self._policy.max_sequences:
                return
            while not self._take(sequence, restores):
                paused = next((one for one in reversed(self._running) if one.paused), None)
                if paused is None:
                    return
                self.preempt(paused)
                preempted.append(paused)
            self._waiting.remove(sequence)
            self.start(sequence)
            chunks.append(self._chunk(sequence, budget))
            budget -= chunks[-1].count

    def _take(self, sequence: Sequence, restores: list[Restore]) -> bool:
        """Take blocks for every token the sequence has, a slot, and the cached prefix; False (taking nothing) if short.

        One more block per running sequence must stay free, or admitting one would only preempt another.
        """
        memory, anchor = self._memory, None
        if sequence.reads_cache:
            hit = memory.hit(sequence.chain, sequence.total_tokens)
            sequence.blocks, anchor = list(hit.blocks), hit.anchor_slot
        fresh = memory.blocks_for(sequence.total_tokens) - len(sequence.blocks)
        if not memory.can_take(fresh + len(self._running), 1):
            memory.give(sequence.blocks, () if anchor is None else (anchor,))
            sequence.blocks = []
            return False
        hit_tokens = len(sequence.blocks) * memory.block_tokens
        sequence.sealed_blocks = len(sequence.blocks)
        sequence.replay_hit, sequence.computed_tokens = memory.resume(hit_tokens)
        if sequence.cached_tokens is None:
            sequence.found_blocks = len(sequence.blocks)
            sequence.cached_tokens = min(sequence.computed_tokens, sequence.prompt_tokens)
        taken, (sequence.slot,) = memory.take(fresh, 1)
        sequence.blocks.extend(taken)
        if anchor is not None:
            restores.append(Restore(sequence, anchor))
        return True

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk:
        start, total, size = sequence.computed_tokens, sequence.total_tokens, self._memory.block_tokens
        end = min(start + budget, total)
        if sequence.cache and self._memory.anchored:
            # Stop where an anchor is wanted: window state exists only at the end of a chunk.
            grid = size * self._policy.anchor_every_blocks
            stops = ((start // grid + 1) * grid, (total - 1) // size * size)
            end = min([end, *(stop for stop in stops if start < stop < end)])
        if end < total and end // size * size > start:
            end = end // size * size
        return Chunk(sequence, start, end - start)

    def _can_grow(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Give the sequence the block its next token needs, preempting from the end of the order; False if it lost."""
        while len(sequence.blocks) < self._memory.blocks_for(sequence.total_tokens):
            if self._memory.can_take(1):
                sequence.blocks.extend(self._memory.take(1)[0])
            else:
                victim = next((one for one in reversed(self._running) if one.paused), self._running[-1])
                self.preempt(victim)
                preempted.append(victim)
                if victim is sequence:
                    return False
        return True

    def _give_back(self, sequence: Sequence) -> None:
        slots = [slot for slot in (sequence.slot, sequence.anchor_slot) if slot is not None]
        self._memory.give(sequence.blocks, slots)
        sequence.blocks, sequence.slot, sequence.anchor_slot, sequence.anchor_tokens = [], None, None, 0
        sequence.computed_tokens = sequence.sealed_blocks = sequence.replay_hit = 0

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        bisect.insort(self._waiting, sequence, key=_rank)


def _rank(sequence: Sequence) -> int:
    return sequence.rank
