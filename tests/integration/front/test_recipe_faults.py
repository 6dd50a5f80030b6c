"""Recipes in processes of their own: killed and frozen, with another one there and without (promises 16 and 20)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from fabric.discovery import MemberInfo, open_discovery
from tests.support import bytemodel, fakeworkers, procs
from tests.support.fakeprocess import counted
from tests.support.frontstack import FrontStack, events, front_stack
from tests.support.promises import Recorder

ENDS = {"kill": 1.0, "freeze": 3.0}  # how a recipe ends, and within how many seconds that must be over for its streams
KINDS = ("reasoning_content", "content")
# Reasoning, a stop string that comes in pieces, and log probabilities: state that a recipe keeps from token to token.
TEXT = "why not</think>" + "".join(chr(ord("a") + index % 26) for index in range(80)) + "é STOP"
ASKED = {"logprobs": True, "stop": ["STOP"], "stream_options": {"include_usage": True}}


@dataclass
class Child:
    """A recipe process that the gateway knows."""

    process: procs.Process
    metrics: str

    async def end(self, how: str) -> None:
        await asyncio.to_thread(getattr(self.process, how))


@dataclass
class Reading:
    """One chat stream that is read to its end; when each piece of it came."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    status: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run(self, stack: FrontStack) -> None:
        async with stack.client.stream(
            "POST", "/v1/chat/completions", json=stack.body(stream=True, **ASKED)
        ) as response:
            self.status = response.status_code
            async for piece in response.aiter_text():
                async with self.changed:
                    self.text += piece
                    self.times.append(time.monotonic())
                    self.changed.notify_all()

    async def reached(self, pieces: int) -> None:
        async with asyncio.timeout(20.0), self.changed:
            await self.changed.wait_for(lambda: len(self.times) >= pieces)

    def gap_s(self, since: float) -> float:
        times = [since, *(at for at in self.times if at > since)]
        return max(later - earlier for earlier, later in pairwise(times))


def told(text: str) -> tuple[str, str, list[str], Any]:
    """Reasoning, content, the tokens of log probabilities, and the usage of a stream that ended well."""
    assert text.endswith("data: [DONE]\n\n")
    chunks = events(text)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    reasoning, content = ("".join(choice["delta"].get(name) or "" for choice in choices) for name in KINDS)
    entries = [entry for choice in choices for name in KINDS for entry in (choice["logprobs"] or {}).get(name) or []]
    assert [choice["delta"].get("role") for choice in choices].count("assistant") == 1
    return (
        reasoning,
        content,
        [entry["token"] for entry in entries],
        chunks[-1]["usage"],
    )


@asynccontextmanager
async def recipe_process(stack: FrontStack, folder: Path, name: str) -> AsyncIterator[Child]:
    """A recipe process, from the moment on when the gateway gives it work."""
    model = ("--model", str(folder / fakeworkers.MODEL), "--instance", name)
    command = procs.python("-m", "services.recipe", "--discovery", f"memory://{name}", *model)
    with procs.spawn(command, folder / f"{name}.log") as process:
        ready = await asyncio.to_thread(process.json)
        async with open_discovery(stack.discovery).register(MemberInfo("recipe", name, ready["address"], 7)):
            child = Child(process, ready["metrics"])
            await known(child)
            yield child


async def known(child: Child) -> None:
    """Returns once the gateway follows the child: it asks who it is before it watches."""
    line = 'deepinfer_rpc_inflight{method="/grpc.health.v1.Health/Watch"} 1.0'
    async with httpx2.AsyncClient() as client, asyncio.timeout(10.0):
        while line not in (await client.get(f"http://{child.metrics}/metrics")).text:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest_asyncio.fixture(loop_scope="session")
async def stack(tmp_path: Path) -> AsyncIterator[FrontStack]:
    async with front_stack(tmp_path, coalesce_ms=0) as running:
        running.script.answer = lambda prompt: bytemodel.encode(TEXT)
        running.script.pause_s = 0.02
        yield running


@asynccontextmanager
async def begun(stack: FrontStack, folder: Path, others: int) -> AsyncIterator[tuple[Child, Reading, Any]]:
    """A stream that the child parses, with so many others that could go on with it."""
    async with AsyncExitStack() as running:
        child = await running.enter_async_context(recipe_process(stack, folder, "first"))
        await stack.recipe.drain()
        reading = Reading()
        task = asyncio.create_task(reading.run(stack))
        await reading.reached(20)
        pace_s, stack.script.pause_s = stack.script.pause_s, 0.25  # the stream outlasts a slow start of the others
        for number in range(others):
            await running.enter_async_context(recipe_process(stack, folder, f"other-{number}"))
        stack.script.pause_s = pace_s
        assert not task.done()
        yield child, reading, task


async def unready(stack: FrontStack, since: float) -> float:
    """Seconds until the gateway says that a request would not be served."""
    async with asyncio.timeout(15.0):
        while (await stack.client.get("/ready")).status_code == 200:  # noqa: ASYNC110  the gateway's view
            await asyncio.sleep(0.01)
    return time.monotonic() - since


async def undisturbed(stack: FrontStack) -> tuple[str, str, list[str], Any]:
    reading = Reading()
    await reading.run(stack)
    return told(reading.text)


@pytest.mark.promise(20)
@pytest.mark.parametrize("how", ENDS)
async def test_a_recipe_that_ends_in_mid_stream_costs_its_stream_nothing_where_another_is(
    stack: FrontStack, tmp_path: Path, how: str, promise: Recorder
) -> None:
    expected = await undisturbed(stack)
    stack.script.pause_s = 0.05
    async with begun(stack, tmp_path, others=1) as (child, reading, task):
        await child.end(how)
        at = time.monotonic()
        stack.script.pause_s = 0.0
        replies = await asyncio.gather(*(stack.chat() for _ in range(10)))
        served_s = time.monotonic() - at
        await task
    assert told(reading.text) == expected
    assert [reply.status_code for reply in replies] == [200] * 10
    bar = ENDS[how]
    promise(20, f"recipe, {how}: longest silence of its stream", reading.gap_s(at), at_most=bar, unit="s")
    promise(20, f"recipe, {how}: the next 10 requests are served after", served_s, at_most=bar + 1.0, unit="s")
    metrics = (await stack.client.get("/metrics")).text
    assert 'next="others",when="parsing"' in metrics


@pytest.mark.promise(20)
@pytest.mark.parametrize("how", ENDS)
async def test_the_only_recipe_takes_its_streams_along_clearly_and_new_requests_are_refused_at_once(
    stack: FrontStack, tmp_path: Path, how: str, promise: Recorder
) -> None:
    expected = await undisturbed(stack)
    stack.script.pause_s = 0.05
    async with begun(stack, tmp_path, others=0) as (child, reading, task):
        await child.end(how)
        at = time.monotonic()
        noticing = asyncio.create_task(unready(stack, at))
        await task
        ended_s, noticed_s = time.monotonic() - at, await noticing
        asked = time.monotonic()
        refused = await stack.chat()
        refused_s = time.monotonic() - asked
        if how == "freeze":
            await asyncio.to_thread(child.process.thaw)
            await stack.until_ready()
            assert (await stack.chat()).status_code == 200
    *chunks, last = events(reading.text)
    content = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert content and expected[1].startswith(content), "what was sent is kept"
    assert last["error"]["code"] == "unavailable" and "no other answers" in last["error"]["message"]
    assert "[DONE]" not in reading.text
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    assert "recipe" in refused.json()["error"]["message"] and refused.headers["retry-after"]
    promise(
        20, f"no recipe, {how}: its streams end after", ended_s, at_most={"kill": 1.0, "freeze": 3.0}[how], unit="s"
    )
    promise(20, f"no recipe, {how}: the gateway is not ready after", noticed_s, at_most=2.0, unit="s")
    promise(20, f"no recipe, {how}: a request is refused after", refused_s, at_most=1.0, unit="s")
    await stack.until_idle(10.0)


@pytest.mark.promise(20)
async def test_from_the_moment_the_only_recipe_is_killed_chats_are_refused_at_once(
    stack: FrontStack, tmp_path: Path, promise: Recorder
) -> None:
    async with recipe_process(stack, tmp_path, "only") as child:
        await stack.recipe.drain()
        assert (await stack.chat()).status_code == 200
        child.process.kill()
        killed, slowest_s, statuses = time.monotonic(), 0.0, list[int]()
        while time.monotonic() - killed < 1.0:
            began = time.monotonic()
            statuses.append((await stack.chat()).status_code)
            slowest_s = max(slowest_s, time.monotonic() - began)
    assert set(statuses) == {503}
    promise(20, "no recipe, kill: the slowest refusal of its first second", slowest_s, at_most=1.0, unit="s")


@pytest.mark.promise(16)
async def test_an_idle_recipe_that_freezes_gets_no_work_after_2_s_and_comes_back(
    stack: FrontStack, tmp_path: Path, promise: Recorder
) -> None:
    """What comes before it is noticed is rendered by another recipe within the same request."""
    stack.script.answer, stack.script.pause_s = counted, 0.0
    async with recipe_process(stack, tmp_path, "child") as child:
        await child.end("freeze")
        at = time.monotonic()
        early = await asyncio.gather(*(stack.chat() for _ in range(6)))
        early_s = time.monotonic() - at
        await asyncio.sleep(max(0.0, 2.0 - early_s))
        late_at = time.monotonic()
        late = await asyncio.gather(*(stack.chat() for _ in range(6)))
        late_s = time.monotonic() - late_at
        assert [reply.status_code for reply in (*early, *late)] == [200] * 12
        promise(16, "frozen recipe: requests it was given are rendered elsewhere after", early_s, at_most=3.0, unit="s")
        promise(16, "frozen recipe: 2 s later a request takes", late_s, at_most=1.0, unit="s")
        metrics = (await stack.client.get("/metrics")).text
        assert 'when="rendering"' in metrics
        await asyncio.to_thread(child.process.thaw)
        await known(child)
        await stack.recipe.drain()
        await stack.until_ready()
        assert (await stack.chat()).status_code == 200
