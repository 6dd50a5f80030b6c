"""From the moment a prefill has a ticket its signs of life keep the ticket, whatever the prefill waits for."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from engine.sampling.params import SamplingParams
from fabric import failpoints
from fabric.errors import StaleTicket
from tests.support.engines import runner_of
from tests.support.frontstack import until
from tests.support.oracle import Oracle
from tests.support.stack import Stack, worker_stack

LEASE_S, WAIT_S = 1.5, 4.5
PROMPT = [3 + 7 * index % 500 for index in range(300)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


async def answered(stack: Stack, request_id: str) -> list[int]:
    return (await stack.ask(PROMPT, GREEDY, request_id)).tokens


@pytest.mark.parametrize("waiting", ["prefill.queued", "prefill.chunk"])
async def test_a_prefill_that_waits_three_leases_long_keeps_its_ticket(
    model: Path, oracle: Oracle, waiting: str
) -> None:
    """Before it has asked a kvstore or its engine for anything, and while it computes."""
    async with worker_stack(model, decode={"lease_s": LEASE_S}) as stack:
        with failpoints.armed(f"{waiting}=delay:{WAIT_S}@1"):
            assert await answered(stack, "slow") == oracle.answer(PROMPT, GREEDY)
        await stack.idle()


async def test_a_prompt_that_an_engine_takes_three_leases_late_keeps_its_ticket(model: Path, oracle: Oracle) -> None:
    """The engine's thread is in a long step of others, and nothing new gets in before its end."""
    async with worker_stack(model, decode={"lease_s": LEASE_S}) as stack:
        runner = runner_of(stack.servicer("prefill"))
        step = asyncio.create_task(runner.call(time.sleep, WAIT_S))
        assert await answered(stack, "queued") == oracle.answer(PROMPT, GREEDY)
        await step
        await stack.idle()


async def test_a_ticket_that_no_prefill_has_ends_with_its_lease(model: Path) -> None:
    """Nobody can extend it: the gateway attaches a ticket in the moment it has it, or releases it."""
    async with worker_stack(model, decode={"lease_s": LEASE_S}) as stack:
        ticket = await stack.reserve("late", PROMPT, len(PROMPT) + GREEDY.max_tokens)
        await until(lambda: not stack.desk.open, LEASE_S + 10.0)
        with pytest.raises(StaleTicket):
            stack.desk._book.claim(ticket.id, "late", ticket.epoch)
