"""A client that leaves at any moment leaves nothing behind, and soon (promise 13)."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

from protos.deepinfer.v1 import decode_pb2
from services.recipe.service import RecipeServicer
from tests.support import bytemodel
from tests.support.frontstack import FrontStack, front_stack, until
from tests.support.promises import Recorder

FINISHED = decode_pb2.WRITER_STATE_FINISHED
NEVER_STARTED = decode_pb2.WRITER_STATE_NEVER_STARTED


async def leave_at(stack: FrontStack, phase: str, streamed: bool) -> None:
    """Asks, waits until the stack stands at `phase`, and closes the connection."""
    stack.script.gates[phase] = asyncio.Event()
    async with httpx2.AsyncClient(base_url=f"http://{stack.http}") as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=stack.body(stream=streamed)))
        await stack.script.wait_for(phase)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking


@pytest.mark.promise(13)
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("phase", "writer"),
    [
        ("prefill", None),  # whether the ticket was on its way is a matter of microseconds
        ("push", FINISHED),
        ("generate", FINISHED),
        ("token:1", FINISHED),
    ],
)
async def test_a_client_that_leaves_frees_everything(
    stack: FrontStack, phase: str, writer: int | None, streamed: bool, promise: Recorder
) -> None:
    await leave_at(stack, phase, streamed)
    left, decode = time.monotonic(), stack.decodes[0].worker
    await stack.until_idle(10.0)
    promise(13, f"left at {phase}: workers idle after", time.monotonic() - left, at_most=0.2, unit="s")
    known = {writer} if writer else {FINISHED, NEVER_STARTED}
    await until(lambda: bool(decode.released) and set(decode.released.values()) <= known, 10.0)


async def test_leaving_while_decode_reserves_releases_the_late_ticket(stack: FrontStack) -> None:
    await leave_at(stack, "reserve", streamed=True)
    decode = stack.decodes[0].worker
    await until(lambda: not stack.prefills[0].worker.watched.running, 10.0)
    stack.script.gates["reserve"].set()
    await until(lambda: bool(decode.released), 10.0)
    assert set(decode.released.values()) == {NEVER_STARTED}
    assert stack.idle()


@pytest.mark.promise(13)
async def test_leaving_the_queue_costs_no_worker_anything(tmp_path: Path, promise: Recorder) -> None:
    async with front_stack(tmp_path, max_inflight=1) as stack:
        stack.script.gates["prefill"] = asyncio.Event()
        first = asyncio.create_task(stack.chat())
        await stack.script.wait_for("prefill")
        async with httpx2.AsyncClient(base_url=f"http://{stack.http}") as client:
            asking = [asyncio.create_task(client.post("/v1/chat/completions", json=stack.body())) for _ in range(5)]
            await queued(stack, 5)
            for task in asking:
                task.cancel()
            left = time.monotonic()
            await asyncio.gather(*asking, return_exceptions=True)
        await queued(stack, 0)
        promise(13, "left in the queue: out of it after", time.monotonic() - left, at_most=0.2, unit="s")
        stack.script.gates["prefill"].set()
        assert (await first).status_code == 200
        assert len(stack.decodes[0].worker.reserves) == 1


async def queued(stack: FrontStack, count: int) -> None:
    """Returns once the gateway says that so many requests wait."""
    async with asyncio.timeout(20.0):
        while f"deepinfer_gateway_queued_requests {count}.0" not in (await stack.client.get("/metrics")).text:
            pass


async def test_the_next_request_works_after_one_was_cancelled(stack: FrontStack) -> None:
    await leave_at(stack, "token:1", streamed=True)
    stack.script.gates.clear()
    tokens = [*bytemodel.encode("</think>fine"), bytemodel.EOS]
    stack.script.answer = lambda prompt: tokens
    reply = await stack.chat()
    assert reply.json()["choices"][0]["message"]["content"] == "fine"


@pytest.mark.promise(13)
@pytest.mark.parametrize("method", ["Render", "Parse"])
async def test_leaving_while_the_recipe_works_ends_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, promise: Recorder
) -> None:
    """The recipe's call stands still; nothing of the request runs anywhere once the client has left."""
    running, reached = [0], asyncio.Event()

    async def standing(self: RecipeServicer, request: object, context: object) -> None:
        running[0] += 1
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            running[0] -= 1

    monkeypatch.setattr(RecipeServicer, method, standing)
    async with front_stack(tmp_path) as stack:
        async with httpx2.AsyncClient(base_url=f"http://{stack.http}") as client:
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=stack.body(stream=True)))
            await reached.wait()
            asking.cancel()
            left = time.monotonic()
            await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not running[0], 10.0)
        await stack.until_idle(10.0)
        promise(13, f"left at {method}: recipe and workers idle after", time.monotonic() - left, at_most=0.2, unit="s")
        await queued(stack, 0)
        assert "deepinfer_gateway_inflight_requests 0.0" in (await stack.client.get("/metrics")).text
