"""The pusher writes each final block once, in order, and only what decode lacks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.cache.pool import CachePool
from engine.requests import HeldKV
from fabric.errors import DeadlineExceeded, ServiceError, Unavailable
from fabric.kvlink import Region, Token, Write
from fabric.kvlink.verify import digest
from fabric.records import Landing, LinkAddress
from fabric.telemetry.metrics import Metrics
from services.prefill.ask import TicketGrant
from services.prefill.marks import Marks
from services.prefill.push import PoolSource, Pusher, PushLimits
from services.prefill.telemetry import PrefillMetrics
from services.worker.geometry import Handoff
from services.worker.notices import HandoffNotice
from tests.support.fakefamily import BLOCK_TOKENS, LAYOUT

TOKENS = 3 * BLOCK_TOKENS + 5
TABLE, SLOT = (6, 2, 9, 4), 3


class RecordingLink:
    """A link into an array: what was written, and every notice in order."""

    def __init__(self, size: int) -> None:
        self.memory = np.zeros(size, np.uint8)
        self.notices: list[HandoffNotice] = []
        self.sizes: list[int] = []
        self.failure: ServiceError | None = None
        self.arrived = asyncio.Semaphore(0)

    async def push(self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes, timeout_s: float) -> None:
        if self.failure is not None:
            raise self.failure
        for write in writes:
            triples = zip(write.source_offsets, write.target_offsets, write.sizes, strict=True)
            for source, target, size in triples:
                self.memory[target : target + size] = write.source.memory[source : source + size]
                self.sizes.append(int(size))
        notice = HandoffNotice.load(notify)
        assert notice is not None
        self.notices.append(notice)
        self.arrived.release()


class Bench:
    """A pool of random bytes and a pusher from it into a recording link."""

    def __init__(self, held_tokens: int = 0, lease_s: float = 30.0, heartbeat_s: float = 0.01) -> None:
        self.pool = CachePool(LAYOUT, 10, 4, torch.float32)
        rng = np.random.default_rng(0)
        for storage in (self.pool.blocks, self.pool.slots):
            storage.numpy()[:] = rng.integers(0, 256, tuple(storage.shape), dtype=np.uint8)
        self.handoff = Handoff(LAYOUT, TOKENS, held_tokens)
        self.link = RecordingLink(self.handoff.landing_bytes)
        landing = Landing(
            "t", LinkAddress("x://", "d", 1), self._token(self.handoff.landing_bytes), 0, self.link.memory.size
        )
        ticket = TicketGrant("t", "r", 1, landing, LAYOUT.fingerprint, "rev", held_tokens, lease_s)
        source = PoolSource(self.pool, self._region(self.pool.blocks), self._region(self.pool.slots))
        self.marks = Marks()
        self.pusher = Pusher(
            self.link,  # type: ignore[arg-type]  # the part of a link that a pusher uses
            source,
            ticket,
            self.handoff,
            lambda: HeldKV(TABLE, SLOT, TOKENS),
            PushLimits(timeout_s=1.0, heartbeat_s=heartbeat_s),
            PrefillMetrics(Metrics("prefill")),
        )

    @staticmethod
    def _token(size: int) -> bytes:
        return Token(0, 0, size).pack()

    def _region(self, storage: torch.Tensor) -> Region:
        memory = storage.numpy().reshape(-1)
        return Region(Token(0, memory.ctypes.data, memory.nbytes), memory)

    def expected(self) -> np.ndarray:
        blocks = [self.pool.blocks.numpy()[block] for block in TABLE[self.handoff.first_block :]]
        return np.concatenate([*blocks, self.pool.slots.numpy()[SLOT]])


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
    assert (bench.link.memory == bench.expected()).all()
    assert {(e.group, e.block, e.offset) for e in extents} == {
        (p.group, p.block, p.offset) for p in bench.handoff.places()
    }
    assert all(digest(bench.link.memory[extent.offset : extent.end]) == extent.digest for extent in extents)
    assert [notice.last for notice in bench.link.notices][-1] and not any(n.last for n in bench.link.notices[:-1])


async def test_each_block_travels_once() -> None:
    bench = Bench()
    running = asyncio.ensure_future(bench.pusher.run(bench.marks))
    for tokens in (BLOCK_TOKENS, BLOCK_TOKENS + 3, 2 * BLOCK_TOKENS):
        await pushed(bench, tokens)
    bench.marks.completed()
    await running
    assert bench.link.sizes == [LAYOUT.block_bytes] * 4 + [LAYOUT.window_bytes]


async def test_what_was_lost_is_sealed_and_pushed_anew() -> None:
    bench = Bench()
    running = asyncio.ensure_future(bench.pusher.run(bench.marks))
    await pushed(bench, 2 * BLOCK_TOKENS)
    bench.marks.lost()
    bench.pool.blocks.numpy()[TABLE[0]] ^= 1  # computed again, with other bytes
    bench.marks.computed(TOKENS)
    bench.marks.completed()
    extents = await running
    assert (bench.link.memory == bench.expected()).all()
    assert len(extents) == len(list(bench.handoff.places()))


async def test_a_waiting_pusher_gives_signs_of_life() -> None:
    bench = Bench()
    running = asyncio.ensure_future(bench.pusher.run(bench.marks))
    await bench.link.arrived.acquire()
    await bench.link.arrived.acquire()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not any(notice.last for notice in bench.link.notices) and not bench.link.sizes


async def test_a_pusher_that_gives_up_says_so_once() -> None:
    bench = Bench()
    await bench.pusher.close()
    await bench.pusher.close()
    assert [notice.last for notice in bench.link.notices] == [True]


async def test_a_failed_push_is_raised_and_closing_after_it_is_not() -> None:
    bench = Bench()
    bench.link.failure = Unavailable("gone")
    bench.marks.computed(BLOCK_TOKENS)
    with pytest.raises(Unavailable):
        await bench.pusher.run(bench.marks)
    await bench.pusher.close()


async def test_after_a_push_that_ran_out_of_time_nobody_says_that_all_of_it_is_over() -> None:
    bench = Bench()
    bench.link.failure = DeadlineExceeded("slow")
    bench.marks.computed(BLOCK_TOKENS)
    with pytest.raises(DeadlineExceeded):
        await bench.pusher.run(bench.marks)
    bench.link.failure = None
    await bench.pusher.close()
    assert bench.link.notices == [HandoffNotice("t", last=False, trailing=True)]


async def test_a_short_lease_gets_more_frequent_signs_of_life() -> None:
    bench = Bench(lease_s=0.06, heartbeat_s=60.0)
    running = asyncio.ensure_future(bench.pusher.run(bench.marks))
    async with asyncio.timeout(10.0):
        await bench.link.arrived.acquire()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
