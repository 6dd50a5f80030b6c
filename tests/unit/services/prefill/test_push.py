"""The pusher writes each final block once, in order, and only what decode lacks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch

from engine.cache.pool import CachePool
from engine.errors import UnknownRequest
from engine.requests import HeldKV
from fabric.errors import DeadlineExceeded, ServiceError, Unavailable
from fabric.kvlink import Notice, Region, Token, Write, messages
from fabric.kvlink.leftovers import Leftovers
from fabric.kvlink.messages import Alive, Chunk, Credit, FromSender, GaveUp, Trailing
from fabric.kvlink.outgoing import Pieces, Sender, SendLimits
from fabric.kvlink.verify import digest
from fabric.records import Extent, Landing, LinkAddress
from fabric.telemetry.metrics import Metrics
from services.prefill import push
from services.prefill.ask import TicketGrant
from services.prefill.marks import Marks
from services.prefill.push import PoolSource, Pusher
from services.prefill.telemetry import PrefillMetrics
from services.worker.extents import extent_view
from services.worker.geometry import Handoff, Place
from services.worker.pairing import Records
from tests.support.fakefamily import BLOCK_TOKENS, LAYOUT

TOKENS = 3 * BLOCK_TOKENS + 5
TABLE, SLOT = (6, 2, 9, 4), 3


class RecordingLink:
    """A link into an array: every extent as it was complete, and every message in order. Confirms the last chunk."""

    address = LinkAddress("x://", "p", 1)

    def __init__(self, size: int) -> None:
        self.memory = np.zeros(size, np.uint8)
        self.messages: list[FromSender] = []
        self.extents: dict[tuple[str, int], np.ndarray] = {}
        self.sizes: list[int] = []
        self.failure: ServiceError | None = None
        self.arrived = asyncio.Semaphore(0)
        self.answer: Callable[[Notice], bool] = lambda notice: False

    @contextmanager
    def expecting(self) -> Iterator[None]:
        yield

    def lends(self, address: LinkAddress, region: Region) -> bool:
        return False

    def push_at_once(self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes) -> bool:
        return False

    async def push(self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes, timeout_s: float) -> None:
        if self.failure is not None:
            raise self.failure
        for write in writes:
            triples = zip(write.source_offsets, write.target_offsets, write.sizes, strict=True)
            for source, target, size in triples:
                self.memory[target : target + size] = write.source.memory[source : source + size]
                self.sizes.append(int(size))
        message = messages.unpack(notify)
        assert isinstance(message, FromSender)
        self.messages.append(message)
        for group, block, _, offset, size, seal in message.extents.rows() if isinstance(message, Chunk) else ():
            self.extents[group, block] = self.memory[offset : offset + size].copy()
            assert digest(self.extents[group, block]) == seal
        self.arrived.release()
        if isinstance(message, Chunk) and message.last:
            self.answer(Notice("d", 1, Credit("t", message.run.end, message.number + 1).pack()))


class Bench:
    """A pool of random bytes and a pusher from it into a recording link."""

    def __init__(self, held_tokens: int = 0, lease_s: float = 30.0, heartbeat_s: float = 0.01) -> None:
        self.pool = CachePool(LAYOUT, 10, 4, torch.float32)
        rng = np.random.default_rng(0)
        for storage in (self.pool.blocks, self.pool.slots):
            storage.numpy()[:] = rng.integers(0, 256, tuple(storage.shape), dtype=np.uint8)
        self.handoff = Handoff(LAYOUT, TOKENS, held_tokens)
        self.link = RecordingLink(8 * self.handoff.landing_bytes)
        size = self.link.memory.size
        landing = Landing("t", LinkAddress("x://", "d", 1), Token(0, 0, size).pack(), 0, size)
        ticket = TicketGrant("t", "r", 1, landing, Records("rev", LAYOUT), held_tokens, lease_s)
        source = PoolSource(self.pool, self._region(self.pool.blocks), self._region(self.pool.slots))
        self.marks = Marks()
        sender = Sender(self.link, SendLimits(timeout_s=1.0))  # type: ignore[arg-type]  # the part of a link that it uses
        self.link.answer = sender.noticed
        self.leftovers = Leftovers(10.0)
        self.pusher = Pusher(
            sender,
            source,
            ticket,
            self.handoff,
            lambda: HeldKV(TABLE, SLOT, TOKENS),
            heartbeat_s,
            PrefillMetrics(Metrics("prefill")),
            partial(self.leftovers.keep, "r"),
        )

    def _region(self, storage: torch.Tensor) -> Region:
        memory = storage.numpy().reshape(-1)
        return Region(Token(0, memory.ctypes.data, memory.nbytes), memory)

    def arrived_as_it_is(self) -> bool:
        """Whether the other side has every extent of the handoff, and nothing else, as the pool has it."""
        wanted = {(p.group, p.block): p for p in self.handoff.places()}
        return self.link.extents.keys() == wanted.keys() and all(
            (self.link.extents[name] == extent_view(self.pool, *name, HeldKV(TABLE, SLOT, TOKENS))).all()
            for name in wanted
        )

    async def ended(self, running: asyncio.Future[tuple[Extent, ...]]) -> None:
        """Returns when a pusher has ended, however it did, and what it left as well."""
        await asyncio.gather(running, return_exceptions=True)
        await self.leftovers.over("r")

    @property
    def endings(self) -> list[FromSender]:
        """What was said that ends a transfer."""
        return [m for m in self.link.messages if not isinstance(m, Alive) and not (isinstance(m, Chunk) and not m.last)]


async def pushed(bench: Bench, tokens: int) -> None:
    """Computes up to `tokens`; returns when the blocks that this made final are written."""
    bench.marks.computed(tokens)
    if tokens // BLOCK_TOKENS > bench.handoff.first_block:
        await bench.link.arrived.acquire()


@pytest.mark.parametrize("held_tokens", [0, BLOCK_TOKENS, 3 * BLOCK_TOKENS])
async def test_the_landing_ends_up_as_the_pool_and_the_receipt_says_so(held_tokens: int) -> None:
    bench = Bench(held_tokens)
    running = asyncio.ensure_future(bench.pusher.run(bench.marks))
    await pushed(bench, max(held_tokens, 2 * BLOCK_TOKENS))
    bench.marks.computed(TOKENS)
    bench.marks.completed()
    extents = await running
    assert bench.arrived_as_it_is()
    assert {(e.group, e.block, e.offset) for e in extents} == {
        (p.group, p.block, p.offset) for p in bench.handoff.places()
    }
    assert all(digest(bench.link.extents[e.group, e.block]) == e.digest for e in extents)
    assert bench.endings == bench.link.messages[-1:]


async def test_each_block_travels_once() -> None:
    bench = Bench()
    running = asyncio.ensure_future(bench.pusher.run(bench.marks))
    for tokens in (BLOCK_TOKENS, BLOCK_TOKENS + 3, 2 * BLOCK_TOKENS):
        await pushed(bench, tokens)
    bench.marks.completed()
    await running
    assert sum(bench.link.sizes) == bench.handoff.landing_bytes and bench.arrived_as_it_is()


async def test_what_was_lost_is_sealed_and_pushed_anew() -> None:
    bench = Bench()
    running = asyncio.ensure_future(bench.pusher.run(bench.marks))
    await pushed(bench, 2 * BLOCK_TOKENS)
    bench.marks.lost()
    bench.pool.blocks.numpy()[TABLE[0]] ^= 1  # computed again, with other bytes
    bench.marks.computed(TOKENS)
    bench.marks.completed()
    extents = await running
    assert bench.arrived_as_it_is()
    assert len(extents) == len(list(bench.handoff.places()))


async def test_a_waiting_pusher_gives_signs_of_life() -> None:
    bench = Bench()
    running = asyncio.ensure_future(bench.pusher.run(bench.marks))
    await bench.link.arrived.acquire()
    await bench.link.arrived.acquire()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert bench.link.messages[:2] == [Alive("t")] * 2 and not bench.link.sizes


async def test_a_pusher_that_gives_up_says_so_once() -> None:
    bench = Bench(heartbeat_s=5.0)
    running = asyncio.ensure_future(bench.pusher.run(bench.marks))
    await pushed(bench, BLOCK_TOKENS)
    running.cancel()
    await bench.ended(running)
    assert bench.endings == [GaveUp("t")]


@pytest.mark.parametrize("seen", [UnknownRequest("r"), HeldKV(TABLE[:1], SLOT, BLOCK_TOKENS)], ids=["none", "fewer"])
async def test_memory_that_was_taken_before_we_heard_of_it_is_waited_for(seen: UnknownRequest | HeldKV) -> None:
    """The engine preempts at the start of a step and tells of it at the end."""
    bench = Bench()
    asked = asyncio.Event()

    def held() -> HeldKV:
        if bench.marks.now.generation:
            return HeldKV(TABLE, SLOT, TOKENS)
        asked.set()
        if isinstance(seen, UnknownRequest):
            raise seen
        return seen

    bench.pusher._held = held
    running = asyncio.ensure_future(bench.pusher.run(bench.marks))
    bench.marks.computed(2 * BLOCK_TOKENS)
    async with asyncio.timeout(10.0):
        await asked.wait()
        bench.marks.lost()
        bench.marks.computed(2 * BLOCK_TOKENS)
        bench.marks.completed()
        extents = await running
    assert bench.arrived_as_it_is()
    assert [(e.group, e.block) for e in extents] == [(p.group, p.block) for p in bench.handoff.places()]


async def test_a_failed_push_is_raised_as_it_is() -> None:
    bench = Bench()
    bench.link.failure = Unavailable("gone")
    bench.marks.computed(BLOCK_TOKENS)
    with pytest.raises(Unavailable):
        await bench.pusher.run(bench.marks)


async def test_after_a_push_that_ran_out_of_time_nobody_says_that_all_of_it_is_over() -> None:
    bench = Bench()

    class Slow(RecordingLink):
        async def push(self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes, timeout_s: float) -> None:
            if writes:
                raise DeadlineExceeded("slow")
            await super().push(address, writes, notify=notify, timeout_s=timeout_s)

    bench.link.__class__ = Slow
    bench.marks.computed(BLOCK_TOKENS)
    with pytest.raises(DeadlineExceeded):
        await bench.pusher.run(bench.marks)
    await bench.leftovers.over("r")
    assert bench.link.messages == [Trailing("t")]


async def test_blocks_that_a_thread_still_seals_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, begun, go_on = Bench(), threading.Event(), threading.Event()

    def seal(self: PoolSource, places: Sequence[Place], kv: HeldKV) -> Pieces:
        begun.set()
        assert go_on.wait(10.0)
        return Pieces.pack([])

    monkeypatch.setattr(PoolSource, "seal", seal)
    monkeypatch.setattr(push, "_INLINE_BYTES", 0)
    running = asyncio.ensure_future(bench.pusher.run(bench.marks))
    bench.marks.computed(BLOCK_TOKENS)
    await asyncio.to_thread(begun.wait, 10.0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    freed: list[str] = []
    bench.leftovers.after("r", lambda: freed.append("r"))
    await bench.link.arrived.acquire()  # decode is told meanwhile
    assert bench.endings == [GaveUp("t")] and not freed
    go_on.set()
    await bench.leftovers.over("r")
    assert freed


async def test_a_short_lease_gets_more_frequent_signs_of_life() -> None:
    bench = Bench(lease_s=0.06, heartbeat_s=60.0)
    running = asyncio.ensure_future(bench.pusher.run(bench.marks))
    async with asyncio.timeout(10.0):
        await bench.link.arrived.acquire()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
