"""A worker that is asked to stop says so first, finishes everything it holds, takes nothing new and exits with 0."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.sampling.params import SamplingParams
from fabric.channels import call
from fabric.errors import StaleTicket, Unavailable
from protos.deepinfer.v1 import decode_pb2
from tests.support.oracle import Oracle
from tests.support.remote import decode_process
from tests.support.stack import Stack, worker_stack

LONG = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
PROMPTS = [[3 + (index * step) % 400 for index in range(60 + 40 * step)] for step in range(1, 5)]
HEALTH = health_pb2.HealthCheckResponse


async def stream(stack: Stack, number: int, begun: asyncio.Semaphore) -> list[int]:
    """One request to its last token."""
    name, prompt = f"r{number}", PROMPTS[number]
    ticket = await stack.reserve(name, prompt, len(prompt) + LONG.max_tokens)
    done = await stack.prefilled(name, prompt, LONG, ticket)
    tokens: list[int] = []
    async for reply in stack.generate(name, prompt, LONG, ticket, done.receipt):
        if not tokens:
            begun.release()
        tokens += reply.token_ids
    return tokens


async def test_sigterm_drops_no_stream_and_waits_for_outstanding_leases(
    tmp_path: Path, model: Path, oracle: Oracle
) -> None:
    options = ("--drain-s", "60", "--lease-s", "120")
    async with decode_process(tmp_path / "decode.log", model, "ucx://", *options) as decode:
        stack, process = decode.stack, decode.process
        health = stack.channels.stub(health_pb2_grpc.HealthStub, stack.running["decode"].address)
        states = health.Watch(health_pb2.HealthCheckRequest())
        assert (await states.read()).status == HEALTH.SERVING
        begun = asyncio.Semaphore(0)
        running = [asyncio.ensure_future(stream(stack, number, begun)) for number in range(len(PROMPTS))]
        outstanding = await stack.reserve("outstanding", PROMPTS[0], 200)
        for _ in PROMPTS:
            await begun.acquire()
        process.terminate()
        assert (await states.read()).status == HEALTH.NOT_SERVING
        assert not any(task.done() for task in running), "too late to see anything"
        with pytest.raises(Unavailable, match="drains") as refused:
            await stack.reserve("late", PROMPTS[0], 200)
        assert refused.value.retryable
        answers = await asyncio.gather(*running)
        assert answers == [oracle.answer(prompt, LONG) for prompt in PROMPTS]
        assert process._process.poll() is None, "a lease is outstanding"
        done = await stack.prefilled("outstanding", PROMPTS[0], LONG, outstanding)
        last = stack.generate("outstanding", PROMPTS[0], LONG, outstanding, done.receipt)
        assert [token async for reply in last for token in reply.token_ids] == answers[0]
        assert await asyncio.to_thread(process.wait, 20.0) == 0


async def test_a_draining_prefill_ends_its_pushes(model: Path, oracle: Oracle) -> None:
    prompt = [3 + index % 400 for index in range(1200)]
    async with worker_stack(model, kvstore=False, prefill={"drain_s": 60.0}) as stack:
        ticket = await stack.reserve("r", prompt, len(prompt) + LONG.max_tokens)
        progress = stack.progress("r", prompt, LONG, ticket)
        assert (await anext(progress)).WhichOneof("progress") == "queued"
        draining = asyncio.ensure_future(stack.running["prefill"].chassis.drain())
        last = [reply async for reply in progress][-1]
        assert last.WhichOneof("progress") == "done"
        await draining
        replies = stack.generate("r", prompt, LONG, ticket, last.done.receipt)
        assert [token async for reply in replies for token in reply.token_ids] == oracle.answer(prompt, LONG)
        await stack.idle()


async def at_decode(stack: Stack) -> dict[str, int]:
    """What decode holds: prefill gives its own part back some time after its receipt."""
    return {name: count for name, count in (await stack.left()).items() if not name.startswith("prefill")}


async def test_calls_that_mean_another_incarnation_change_nothing(model: Path) -> None:
    prompt = PROMPTS[0]
    async with worker_stack(model, kvstore=False) as stack:
        ticket = await stack.reserve("r", prompt, 200)
        await stack.prefilled("r", prompt, LONG, ticket)
        async with asyncio.timeout(10.0):  # decode has verified everything: its landing is free, its blocks are full
            while "landings" in await stack.left():  # noqa: ASYNC110  it tells nobody but its own Generate
                await asyncio.sleep(0.005)
        held, pool = await at_decode(stack), stack.engine("decode").pool
        before = pool.blocks.clone()
        release = decode_pb2.ReleaseRequest(ticket_id=ticket.id, epoch=ticket.epoch - 1)
        with pytest.raises(StaleTicket):
            await call(stack.decode.Release, release)
        request = decode_pb2.ReserveRequest(
            request_id="x", token_ids=prompt, layout=ticket.layout, epoch=ticket.epoch - 1
        )
        with pytest.raises(StaleTicket):
            await call(stack.decode.Reserve, request)
        assert await at_decode(stack) == held and bool((pool.blocks == before).all())
        assert await stack.release(ticket, decode_pb2.WRITER_STATE_FINISHED)
        await stack.idle()
