"""A prefill process dies or freezes in mid-handoff: its landing returns on proof of its end, and not before."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.sampling.params import SamplingParams
from fabric.errors import DeadlineExceeded, Exhausted, ServiceError
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import decode_pb2
from tests.support.frontstack import until
from tests.support.oracle import Oracle
from tests.support.remote import RemotePrefill, decode_alone, decode_process, prefill_process, use
from tests.support.stack import Stack, worker_stack

TOKENS = [3 + index % 500 for index in range(1200)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
FREEZES = ("--failpoints", "prefill.chunk=freeze@4")
UNKNOWN = decode_pb2.WRITER_STATE_UNKNOWN


def doubted(stack: Stack) -> int:
    landings = stack.desk._landings.stats()
    return int(landings.quarantined + landings.retired)


async def freeze_in_mid_handoff(stack: Stack, prefill: RemotePrefill) -> common.Ticket:
    """The worker stands between two chunks, some pushed, some not; its gateway has given it up."""
    use(stack, prefill)
    ticket = await stack.reserve("first", TOKENS, len(TOKENS) + 6)
    running = asyncio.ensure_future(stack.prefilled("first", TOKENS, GREEDY, ticket))
    stopped = os.WSTOPPED | os.WEXITED | os.WNOWAIT
    await asyncio.to_thread(os.waitid, os.P_PID, prefill.process.pid, stopped)
    running.cancel()
    with suppress(asyncio.CancelledError, ServiceError):
        async with asyncio.timeout(0.1):  # it says cancel politely to a peer that does not hear
            await running
    assert await stack.release(ticket, UNKNOWN)
    assert doubted(stack) and stack.desk.open == 0
    return ticket


@pytest.mark.parametrize("transport", ["ucx://", "tcp://127.0.0.1:0"])
async def test_a_killed_prefills_landing_returns_and_a_frozen_ones_does_not(
    tmp_path: Path, model: Path, oracle: Oracle, transport: str
) -> None:
    async with (
        decode_alone(model, transport) as stack,
        prefill_process(stack, tmp_path / "one.log", model, transport, *FREEZES) as first,
        prefill_process(stack, tmp_path / "two.log", model, transport) as second,
    ):
        await freeze_in_mid_handoff(stack, first)
        use(stack, second)
        for length in (150, 700, 1100):
            tokens = TOKENS[7:length]
            assert (await stack.ask(tokens, GREEDY)).tokens == oracle.answer(tokens, GREEDY)
        signs = stack.desk.signs
        await until(lambda: stack.desk.signs > signs + 8, within_s=30.0)  # sweeps: longer than any linger
        assert doubted(stack), "a frozen process may still write"
        first.process.kill()
        await until(lambda: not doubted(stack), within_s=30.0)
        tokens = TOKENS[9:900]
        assert (await stack.ask(tokens, GREEDY)).tokens == oracle.answer(tokens, GREEDY)
        await stack.idle()


async def test_a_frozen_prefill_that_was_given_up_changes_nothing_when_it_wakes(
    tmp_path: Path, model: Path, oracle: Oracle
) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    prompt = TOKENS[11:600]
    async with (
        decode_alone(model, "ucx://") as stack,
        prefill_process(stack, tmp_path / "one.log", model, "ucx://", *FREEZES) as first,
        prefill_process(stack, tmp_path / "two.log", model, "ucx://") as second,
    ):
        await freeze_in_mid_handoff(stack, first)
        use(stack, second)
        running = asyncio.ensure_future(stack.ask(prompt, long))

        async def decodes() -> bool:
            return (await stack.stats("decode")).output_tokens > 5

        await until(decodes, within_s=30.0)
        first.process.thaw()  # writes on into what is not its own any more, and then says that it is done
        assert (await running).tokens == oracle.answer(prompt, long)
        await until(lambda: not doubted(stack), within_s=30.0)
        await stack.idle()


async def test_decode_says_that_too_much_is_in_doubt_and_when_it_no_longer_is(model: Path) -> None:
    async with worker_stack(model, kvstore=False, decode={"landing_mb": 1}) as stack:
        health = stack.channels.stub(health_pb2_grpc.HealthStub, stack.running["decode"].address)
        states = health.Watch(health_pb2.HealthCheckRequest())
        assert (await states.read()).status == health_pb2.HealthCheckResponse.SERVING
        tickets = [await stack.reserve(f"r{number}", TOKENS[:40], 60) for number in range(3)]
        for ticket in tickets:
            await stack.release(ticket, UNKNOWN)
        assert (await states.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(Exhausted, match="in doubt"):
            await stack.reserve("more", TOKENS[:40], 60)
        assert blocked(stack) == 1.0
        for ticket in tickets:
            await stack.release(ticket, decode_pb2.WRITER_STATE_FINISHED)
        assert (await states.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert blocked(stack) == 0.0
        await stack.idle()


def blocked(stack: Stack) -> float | None:
    registry = stack.running["decode"].servicer.core.metrics.registry
    return registry.get_sample_value("deepinfer_decode_landings_blocked")


async def test_a_push_that_ran_out_of_time_leaves_no_memory_in_doubt_once_decode_is_awake_again(
    tmp_path: Path, model: Path, oracle: Oracle
) -> None:
    # NIXL's lane: what writes into mapped memory does not wait for its owner.
    async with decode_process(tmp_path / "decode.log", model, "ucx://?mapped=off", push_timeout_s=1.5) as decode:
        stack = decode.stack
        ticket = await stack.reserve("first", TOKENS, len(TOKENS) + 6)
        decode.process.freeze()
        with pytest.raises(DeadlineExceeded):
            await stack.prefilled("first", TOKENS, GREEDY, ticket)
        decode.process.thaw()
        await stack.release(ticket, UNKNOWN)
        assert await decode.metric("deepinfer_decode_landings_quarantined") == 1
        async with asyncio.timeout(30.0):
            while await decode.metric("deepinfer_decode_landings_quarantined"):  # noqa: ASYNC110  another process
                await asyncio.sleep(0.05)
        tokens = TOKENS[9:900]
        assert (await stack.ask(tokens, GREEDY)).tokens == oracle.answer(tokens, GREEDY)
        assert await decode.metric("deepinfer_decode_tickets_open") == 0
