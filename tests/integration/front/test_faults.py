"""Workers that die, bursts, and what must never be told."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import grpc
import pytest
import structlog

from fabric.errors import DataLoss, Unavailable
from protos.deepinfer.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support import bytemodel, fakeworkers
from tests.support.frontstack import FrontStack, events, front_stack, until

T = TypeVar("T")


@pytest.mark.parametrize("phase", ["prefill", "push", "reserve", "generate"])
async def test_a_worker_killed_before_the_first_token_costs_a_retry_not_the_request(
    two_pairs: FrontStack, phase: str
) -> None:
    stack = two_pairs
    stack.script.gates[phase] = asyncio.Event()
    asking = asyncio.create_task(stack.chat())
    await stack.script.wait_for(phase)
    side = stack.prefills if phase in ("prefill", "push") else stack.decodes
    victim = next(s for s in side if s.worker.watched.running or (phase == "reserve" and s.worker.reserves))
    await victim.kill()
    stack.script.gates[phase].set()
    assert (await asking).status_code == 200
    await until(lambda: not any(s.worker.tickets for s in stack.decodes if s is not victim), 10.0)


async def test_a_kill_after_the_first_token_ends_the_stream_clearly_where_nobody_else_is(
    own_stack: FrontStack,
) -> None:
    stack = own_stack
    tokens = [*bytemodel.encode("</think>abcdef"), bytemodel.EOS]
    stack.script.answer = lambda prompt: tokens
    stack.script.gates["token:4"] = asyncio.Event()
    asking = asyncio.create_task(stack.chat(stream=True))
    await stack.script.wait_for("token:4")
    await stack.decodes[0].kill()
    reply = await asking
    *chunks, last = events(reply.text)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "abc"
    assert last["error"]["code"] == "unavailable" and "broke off" in last["error"]["message"]
    assert "[DONE]" not in reply.text


async def test_a_dead_worker_gets_no_more_work(two_pairs: FrontStack) -> None:
    stack, victim = two_pairs, two_pairs.decodes[0]
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        await victim.kill()
        async with victim.haunted() as called:
            async with asyncio.timeout(10.0):
                while await decode_workers(stub) == 2:
                    pass
            called.clear()
            await stack.until_ready()
            for _ in range(10):
                assert (await stack.chat()).status_code == 200
            async with asyncio.timeout(10.0):  # it is asked how it is, now and then
                while "Info" not in called:
                    await decode_workers(stub)
            assert "Reserve" not in called


async def decode_workers(stub: gateway_pb2_grpc.GatewayServiceStub) -> int:
    """Decode workers that the gateway would give work to."""
    return sum(model.decode_workers for model in (await stub.ListModels(gateway_pb2.ListModelsRequest())).models)


async def test_a_model_whose_workers_are_gone_is_away_and_not_unknown(own_stack: FrontStack) -> None:
    stack = own_stack
    for served in (*stack.prefills, *stack.decodes):
        await served.kill()
    async with asyncio.timeout(10.0):
        while (await stack.client.get("/ready")).status_code == 200:
            pass
    for reply in (await stack.chat(), await stack.client.get(f"/v1/models/{fakeworkers.MODEL}")):
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    for reply in (await stack.chat(model="none"), await stack.client.get("/v1/models/none")):
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_draining_worker_gets_no_more_work(two_pairs: FrontStack) -> None:
    stack, leaving = two_pairs, two_pairs.prefills[0]
    await leaving.worker.report(draining=True)
    await leaving.worker.heard()
    for _ in range(10):
        assert (await stack.chat()).status_code == 200
    assert leaving.worker.watched.requests == []


async def test_a_recipe_that_drains_ends_the_streams_that_it_parses(own_stack: FrontStack) -> None:
    stack = own_stack
    tokens = [*bytemodel.encode("</think>abcdef"), bytemodel.EOS]
    stack.script.answer = lambda prompt: tokens
    stack.script.gates["token:4"] = asyncio.Event()
    asking = asyncio.create_task(stack.chat(stream=True))
    await stack.script.wait_for("token:4")
    draining = asyncio.create_task(stack.recipe.drain())
    async with asyncio.timeout(20.0):
        while (await stack.client.get("/ready")).status_code == 200:  # noqa: ASYNC110  the gateway hears of it
            await asyncio.sleep(0.005)
    stack.script.gates["token:4"].set()
    reply = await asking
    told = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in events(reply.text))
    assert told == "abcdef" and "[DONE]" in reply.text
    await draining


async def test_equal_workers_share_the_work(two_pairs: FrontStack) -> None:
    await asyncio.gather(*(two_pairs.chat(f"q{i}") for i in range(60)))
    for side in (two_pairs.prefills, two_pairs.decodes):
        counts = [len(s.worker.watched.requests) for s in side]
        assert sum(counts) == 60 and min(counts) >= 15


async def test_failed_verification_is_repeated_elsewhere(two_pairs: FrontStack) -> None:
    two_pairs.script.faults["generate"] = [DataLoss("digest mismatch")]
    assert (await two_pairs.chat()).status_code == 200
    assert sum(len(s.worker.reserves) for s in two_pairs.decodes) == 2


async def test_a_burst_is_served_or_refused_never_reset(tmp_path: Path) -> None:
    """Promise 27: far more calls at once than may wait."""
    message = gateway_pb2.ChatMessage(role="user", content="x")
    request = gateway_pb2.ChatRequest(model=fakeworkers.MODEL, messages=[message])
    async with (
        front_stack(tmp_path, max_queued=150) as stack,
        grpc.aio.insecure_channel(stack.grpc, options=[("grpc.enable_retries", 0)]) as channel,
    ):
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        stack.script.gates["prefill"] = asyncio.Event()
        asking = [asyncio.create_task(code_of(stub.Chat(request, timeout=60))) for _ in range(1500)]
        refused = await finished(asking, 1500 - 16 - 150)
        assert {task.result() for task in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        stack.script.gates["prefill"].set()
        codes = Counter(await asyncio.gather(*asking))
        await stack.until_idle(10.0)
    assert codes == {grpc.StatusCode.OK: 166, grpc.StatusCode.RESOURCE_EXHAUSTED: 1334}


async def finished(tasks: Sequence[asyncio.Task[T]], count: int) -> set[asyncio.Task[T]]:
    """Waits until `count` of the tasks are done; returns those that are."""
    done: set[asyncio.Task[T]] = set()
    async with asyncio.timeout(30.0):
        while len(done) < count:
            more, _ = await asyncio.wait(set(tasks) - done, return_when=asyncio.FIRST_COMPLETED)
            done |= more
    return done


async def code_of(calling: grpc.aio.UnaryStreamCall) -> grpc.StatusCode:
    """Reads a call to its end."""
    with suppress(grpc.aio.AioRpcError):
        async for _ in calling:
            pass
    return await calling.code()


async def test_over_http_overload_is_429_with_a_hint(tmp_path: Path) -> None:
    """Promise 26: refused early and honestly; those admitted are served."""
    async with front_stack(tmp_path, max_inflight=1, max_queued=2) as stack:
        stack.script.gates["prefill"] = asyncio.Event()
        asking = [asyncio.create_task(stack.chat()) for _ in range(20)]
        done = await finished(asking, 17)
        assert {(task.result().status_code, task.result().headers["retry-after"]) for task in done} == {(429, "1")}
        stack.script.gates["prefill"].set()
        assert sorted(reply.status_code for reply in await asyncio.gather(*asking)) == [200] * 3 + [429] * 17


async def test_prompts_and_keys_never_reach_logs_or_errors(
    two_pairs: FrontStack, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Promise 43: canaries through every path, failures included."""
    stack, canary = two_pairs, "CANARY5512"
    caplog.set_level(logging.DEBUG)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG))
    answer = [*bytemodel.encode(f"{canary}</think>{canary}"), bytemodel.EOS]
    stack.script.answer = lambda prompt: answer
    key = {"authorization": f"Bearer {canary}"}
    told = []
    for fault in (None, "prefill", "reserve", "generate", "token:3"):
        if fault:
            stack.script.faults[fault] = [Unavailable("x") for _ in range(4)]
        told.append(await stack.client.post("/v1/chat/completions", json=stack.body(canary, stream=True), headers=key))
    bad = [
        {"temperature": canary},
        {"messages": [{"role": canary, "content": canary}]},
        {"stop": [canary] * 17},
        {"tools": [{"type": "function", "function": {"name": canary, "parameters": {"type": canary}}}]},
        {"model": canary},
        {"messages": [{"role": "user", "content": canary * 2000}]},
    ]
    errors = [await stack.client.post("/v1/chat/completions", json=stack.body() | fields) for fields in bad]
    out, err = capfd.readouterr()
    assert canary not in out + err + caplog.text
    metrics = (await stack.client.get("/metrics")).text
    assert canary not in metrics
    assert [reply.status_code for reply in told][1:4] == [503, 503, 503]
    assert all(reply.status_code in (400, 404) for reply in errors)
    assert not [reply.text for reply in errors if canary in reply.text and reply.status_code != 404]
