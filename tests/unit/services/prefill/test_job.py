"""A job that ends before it wrote anything still tells whoever holds a landing for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import Exhausted as EngineExhausted
from engine.sampling.params import SamplingParams
from fabric.errors import Exhausted
from fabric.records import Landing, LinkAddress
from services.prefill.ask import PrefillAsk, TicketGrant
from services.prefill.job import PrefillJob, Progress
from services.worker.pairing import Records
from tests.support.fakefamily import LAYOUT

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

    async def give_up(self, landing: Landing) -> None:
        self.given_up.append(landing)

    @asynccontextmanager
    async def transfer(self, landing: Landing, total_bytes: int) -> AsyncIterator[Tools]:
        """Nothing is sent in these tests, so that its end tells that nothing will be written."""
        try:
            yield self
        finally:
            await self.give_up(landing)

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
    assert tools.given_up == told


async def test_a_job_that_the_engine_refuses_ends_its_landing() -> None:
    tools = Tools()
    tools.load_gate.set()
    with pytest.raises(Exhausted):
        await job(tools, TICKET).run(0)
    assert tools.given_up == [LANDING]
