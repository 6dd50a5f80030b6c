"""A job that ends before it wrote anything still tells whoever holds a landing for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from engine.batch import RaggedBatch
from engine.errors import Exhausted as EngineExhausted
from engine.runner import EngineRunner
from engine.sampling.params import SamplingParams
from fabric.errors import Exhausted, Internal
from fabric.kvlink import Region, Token, Write, messages
from fabric.kvlink.leftovers import Leftovers
from fabric.kvlink.outgoing import Leave, Sender, SendLimits
from fabric.records import Landing, LinkAddress
from fabric.telemetry.metrics import Metrics
from services.prefill import job as job_module
from services.prefill.ask import PrefillAsk, TicketGrant
from services.prefill.job import PrefillJob, Progress
from services.prefill.push import PoolSource
from services.prefill.telemetry import PrefillMetrics
from services.worker.pairing import Records
from tests.support.fakefamily import LAYOUT, fake_engine

ASK = PrefillAsk("r", (5, 6, 7), SamplingParams(), b"", use_cache=True)
LANDING = Landing("t", LinkAddress("inproc://", "decode", 1, b""), b"", 0, 64)
TICKET = TicketGrant("t", "r", 1, LANDING, Records("m", LAYOUT), 0, 30.0)


class Tools:
    """A worker whose loader and engine do what a test says, and a sender that keeps what was told."""

    def __init__(self) -> None:
        self.given_up: list[Landing] = []
        self.loading, self.load_gate = asyncio.Event(), asyncio.Event()
        self.sender = self.loader = self.engine = self
        self.source = self.metrics = None
        self.model = SimpleNamespace(layout=LAYOUT, revision="m")
        self.heartbeat_s = self.ticket_wait_s = 1.0
        self.leftovers = Leftovers(10.0)

    async def give_up(self, landing: Landing) -> None:
        self.given_up.append(landing)

    @asynccontextmanager
    async def transfer(self, landing: Landing, total_bytes: int, leave: Leave) -> AsyncIterator[Tools]:
        """Nothing is sent in these tests, so that its end tells that nothing will be written."""
        try:
            yield self
        finally:
            leave(self.give_up(landing))

    async def load(self, ask: PrefillAsk) -> None:
        self.loading.set()
        await self.load_gate.wait()

    async def submit(self, request: Any) -> None:
        raise EngineExhausted("blocks", needed=1, free=0)


def job(tools: Tools, ticket: TicketGrant | None) -> PrefillJob:
    attached: asyncio.Future[TicketGrant] = asyncio.get_running_loop().create_future()
    if ticket is not None:
        attached.set_result(ticket)

    async def report(progress: Progress) -> None: ...

    return PrefillJob(tools, ASK, attached, report)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ticket", "told"), [(TICKET, [LANDING]), (None, [])])
async def test_a_job_that_is_cancelled_before_the_engine_has_it_ends_its_landing(
    ticket: TicketGrant | None, told: list[Landing]
) -> None:
    tools = Tools()
    running = asyncio.create_task(job(tools, ticket).run(0))
    await tools.loading.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await tools.leftovers.over("r")
    assert tools.given_up == told


async def test_a_job_that_the_engine_refuses_ends_its_landing() -> None:
    tools = Tools()
    tools.load_gate.set()
    with pytest.raises(Exhausted):
        await job(tools, TICKET).run(0)
    await tools.leftovers.over("r")
    assert tools.given_up == [LANDING]


class Gate:
    """Stops the engine thread inside one of its forward passes until opened."""

    def __init__(self, stops_at: int | None) -> None:
        self._stops_at, self.passes = stops_at, 0
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, batch: RaggedBatch) -> None:
        self.passes += 1
        if self.passes == self._stops_at:
            self.entered.set()
            assert self.opened.wait(10.0)


class StuckLink:
    """A link whose writes end when they are let go."""

    address = LinkAddress("x://", "p", 1)

    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.said: list[bytes] = []

    def lends(self, address: LinkAddress, region: Region) -> bool:
        return False

    def push_at_once(self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes) -> bool:
        return False

    async def push(self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes, timeout_s: float) -> None:
        if writes:
            self.begun.set()
            await self.go_on.wait()
        self.said.append(notify)


class NoStore:
    async def load(self, ask: PrefillAsk) -> None: ...


def stuck(runner: EngineRunner, link: StuckLink) -> job_module.Tools:
    """A worker without a store over a real engine, whose writes go to `link`."""
    pool = runner.engine.pool
    blocks, slots = (Region(Token(0, 0, memory.nbytes), memory) for memory in (pool.host_blocks, pool.host_slots))
    sender = Sender(link, SendLimits())  # type: ignore[arg-type]  # the part of a link that it uses
    source, metrics = PoolSource(pool, blocks, slots), PrefillMetrics(Metrics("prefill"))
    rest: Any = (source, NoStore(), None, 5.0, 5.0, metrics)
    return job_module.Tools(runner, sender, Leftovers(10.0), *rest)


def long_job(tools: job_module.Tools) -> PrefillJob:
    """Of three chunks, the first of which is written while the second is computed."""
    ask = PrefillAsk("r", tuple(range(2, 50)), SamplingParams(), b"", use_cache=False)
    landing = Landing("t", LinkAddress("x://", "d", 1), Token(0, 0, 1 << 20).pack(), 0, 1 << 20)
    attached: asyncio.Future[TicketGrant] = asyncio.get_running_loop().create_future()
    attached.set_result(TicketGrant("t", "r", 1, landing, Records("revision-1", LAYOUT), 0, 30.0))

    async def report(progress: Progress) -> None: ...

    return PrefillJob(tools, ask, attached, report)


@pytest.mark.parametrize("computing", [True, False])
async def test_blocks_that_a_write_still_reads_outlive_their_job_and_nothing_more_is_computed(computing: bool) -> None:
    gate, link = Gate(stops_at=2 if computing else None), StuckLink()
    runner = EngineRunner(fake_engine(spy=gate))
    tools = stuck(runner, link)
    try:
        running = asyncio.create_task(long_job(tools).run(0))
        await asyncio.wait_for(link.begun.wait(), 10.0)
        if computing:
            assert await asyncio.to_thread(gate.entered.wait, 10.0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 5.0)
        gate.opened.set()
        stats = await runner.call(runner.engine.stats)
        assert (stats.held, stats.waiting, stats.running) == (1, 0, 0) and stats.blocks_held > 0
        assert link.said == [], "the write is under way"
        link.go_on.set()
        await tools.leftovers.over("r")
        stats = await runner.call(runner.engine.stats)
        assert stats.held == stats.blocks_held == stats.slots_held == 0
        assert gate.passes == 2 or not computing
        assert isinstance(messages.unpack(link.said[-1]), messages.GaveUp)
    finally:
        gate.opened.set()
        await runner.close()


async def test_a_request_that_fails_before_its_first_chunk_is_heard_of_fails_with_its_own_reason() -> None:
    go_on, passes = threading.Event(), list[RaggedBatch]()

    def second_fails(batch: RaggedBatch) -> None:
        passes.append(batch)
        assert go_on.wait(10.0)
        if len(passes) == 2:
            raise ValueError("a defect of the model")

    runner = EngineRunner(fake_engine(spy=second_fails))
    try:
        running = asyncio.create_task(long_job(stuck(runner, StuckLink())).run(0))
        async with asyncio.timeout(10.0):
            while not passes:  # noqa: ASYNC110  the engine's thread
                await asyncio.sleep(0.001)
        go_on.set()
        late = time.monotonic() + 10.0
        while runner.engine._sequences and time.monotonic() < late:  # the event loop hears nothing meanwhile
            time.sleep(0.001)  # noqa: ASYNC251
        with pytest.raises(Internal, match="a defect of the model"):
            await asyncio.wait_for(running, 10.0)
    finally:
        await runner.close()
