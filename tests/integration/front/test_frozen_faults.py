"""Workers in processes of their own: killed, frozen and merely busy (promises 10, 15, 16 and 18)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from protos.deepinfer.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support import bytemodel, fakeworkers
from tests.support.fakeprocess import counted, drain_others, worker_process
from tests.support.frontstack import FrontStack, front_stack, until
from tests.support.promises import Recorder

PAUSE_S = 0.02


class Reading:
    """One Generate stream that is read to its end; when each of its tokens came."""

    def __init__(self, stub: Any) -> None:
        ids = gateway_pb2.TokenIds(ids=bytemodel.encode("hi"))
        request = gateway_pb2.GatewayServiceGenerateRequest(model=fakeworkers.MODEL, token_ids=ids)
        self.tokens: list[int] = []
        self.times: list[float] = []
        self._changed = asyncio.Condition()
        self._task = asyncio.create_task(self._read(stub.Generate(request, timeout=60)))

    async def _read(self, replies: Any) -> None:
        async for reply in replies:
            assert reply.first_index == len(self.tokens)
            async with self._changed:
                self.tokens += reply.token_ids
                self.times.append(time.monotonic())
                self._changed.notify_all()

    async def reached(self, count: int) -> None:
        async with asyncio.timeout(20.0), self._changed:
            await self._changed.wait_for(lambda: len(self.tokens) >= count or self._task.done())

    async def whole(self) -> None:
        """Returns at the end of an answer that is exactly the undisturbed one."""
        async with asyncio.timeout(30.0):
            await self._task
        assert self.tokens == counted(())

    def gap_s(self, since: float) -> float:
        """The longest silence after `since`."""
        times = [since, *(at for at in self.times if at > since)]
        return max(later - earlier for earlier, later in pairwise(times))


@pytest_asyncio.fixture(loop_scope="session")
async def stack(tmp_path: Path) -> AsyncIterator[FrontStack]:
    async with front_stack(tmp_path, coalesce_ms=0) as running:
        running.script.answer = counted
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def stub(stack: FrontStack) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        yield gateway_pb2_grpc.GatewayServiceStub(channel)


async def workers(stub: Any, side: str = "decode_workers") -> int:
    """Workers that the gateway would give work to."""
    models = (await stub.ListModels(gateway_pb2.ListModelsRequest())).models
    return sum(getattr(model, side) for model in models)


async def workers_become(stub: Any, count: int, within_s: float, side: str = "decode_workers") -> None:
    async with asyncio.timeout(within_s):
        while await workers(stub, side) != count:  # noqa: ASYNC110  another party's view
            await asyncio.sleep(0.01)


async def failures(stack: FrontStack) -> str:
    metrics = (await stack.client.get("/metrics")).text
    return "\n".join(
        line for line in metrics.splitlines() if line.startswith("deepinfer_gateway_worker_failures_total{")
    )


async def begun(stack: FrontStack, stub: Any) -> Reading:
    """A stream that the child generates and that others could go on with."""
    await workers_become(stub, 1, 5.0)
    reading = Reading(stub)
    await reading.reached(5)
    await drain_others(stack, draining=False)
    await workers_become(stub, 2, 5.0)
    return reading


@pytest.mark.promise(15)
async def test_a_killed_worker_costs_its_stream_nothing(
    stack: FrontStack, stub: Any, tmp_path: Path, promise: Recorder
) -> None:
    async with worker_process(stack, tmp_path / "child.log", pause_s=PAUSE_S) as child:
        reading = await begun(stack, stub)
        child.kill()
        at = time.monotonic()
        await workers_become(stub, 1, 5.0)
        noticed_s = time.monotonic() - at
        await reading.whole()
    assert 'next="others"' in await failures(stack)
    promise(15, "killed decode: no new work after", noticed_s, at_most=1.0, unit="s")
    promise(15, "killed decode: longest silence of its stream", reading.gap_s(at), at_most=1.0, unit="s")


@pytest.mark.promise(16)
async def test_a_frozen_worker_loses_its_streams_within_3_s_and_its_place_within_2(
    stack: FrontStack, stub: Any, tmp_path: Path, promise: Recorder
) -> None:
    async with worker_process(stack, tmp_path / "child.log", pause_s=PAUSE_S) as child:
        reading = await begun(stack, stub)
        await asyncio.to_thread(child.freeze)
        at = time.monotonic()
        await workers_become(stub, 1, 3.0)
        noticed_s = time.monotonic() - at
        await reading.whole()
        promise(16, "frozen decode in mid-stream: no new work after", noticed_s, at_most=2.0, unit="s")
        promise(16, "frozen decode: longest silence of its stream", reading.gap_s(at), at_most=3.0, unit="s")
        child.thaw()
        await workers_become(stub, 2, 5.0)
        await drain_others(stack, draining=True)
        await workers_become(stub, 1, 5.0)
        await Reading(stub).whole()


@pytest.mark.slow
@pytest.mark.promise(16)
async def test_an_idle_worker_that_freezes_gets_no_work_after_2_s(
    stack: FrontStack, stub: Any, tmp_path: Path, promise: Recorder
) -> None:
    async with worker_process(stack, tmp_path / "child.log", pause_s=PAUSE_S) as child:
        await workers_become(stub, 1, 5.0)
        await Reading(stub).whole()
        await drain_others(stack, draining=False)
        await workers_become(stub, 2, 5.0)
        await asyncio.to_thread(child.freeze)
        at = time.monotonic()
        await workers_become(stub, 1, 3.0)
        promise(16, "frozen idle decode: no new work after", time.monotonic() - at, at_most=2.0, unit="s")
        await asyncio.gather(*(Reading(stub).whole() for _ in range(4)))
        assert await failures(stack) == ""


@pytest.mark.slow
@pytest.mark.promise(16)
async def test_a_worker_that_holds_its_interpreter_for_4_s_keeps_stream_and_place(
    stack: FrontStack, stub: Any, tmp_path: Path, promise: Recorder
) -> None:
    async with worker_process(stack, tmp_path / "child.log", pause_s=PAUSE_S) as child:
        reading = await begun(stack, stub)
        child.tell("hold 4")
        at = time.monotonic()
        assert (await asyncio.to_thread(child.json))["held"]
        releasing = asyncio.create_task(asyncio.to_thread(child.json))
        while not releasing.done():
            assert await workers(stub) == 2
            await asyncio.sleep(0.05)
        await reading.whole()
    assert reading.gap_s(at) >= 3.5
    alarms = len((await failures(stack)).splitlines())
    promise(16, "decode busy for 4 s: false alarms", alarms, exactly=0)


@pytest.mark.promise(16, 18)
@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_a_prompt_leaves_a_prefill_that_dies_or_freezes_within_3_s(
    stack: FrontStack, stub: Any, tmp_path: Path, how: str, promise: Recorder
) -> None:
    async with worker_process(stack, tmp_path / "child.log", "prefill") as child:
        await workers_become(stub, 1, 5.0, "prefill_workers")
        reading = Reading(stub)
        await until(lambda: bool(stack.decodes[0].worker.reserves), 5.0)
        await drain_others(stack, draining=False, service="prefill")
        await workers_become(stub, 2, 5.0, "prefill_workers")
        await asyncio.to_thread(getattr(child, how))
        at = time.monotonic()
        await reading.reached(1)
        moved_s = time.monotonic() - at
        await reading.whole()
    number, what = (18, "killed prefill") if how == "kill" else (16, "frozen prefill")
    promise(number, f"{what}: its prompt's first token comes from another after", moved_s, at_most=3.0, unit="s")
