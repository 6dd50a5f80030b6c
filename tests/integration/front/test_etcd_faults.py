"""Members in a real etcd: one that dies, one that is cut off, and an etcd that is away (promises 15, 21, 22)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from fabric.discovery import open_discovery
from fabric.discovery.etcd import Timing
from protos.deepinfer.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support import fakeworkers
from tests.support.fakeprocess import EPOCH, counted, drain_others, worker_process
from tests.support.faultproxy import Faults, fault_proxy
from tests.support.frontstack import FrontStack, front_stack
from tests.support.promises import Recorder
from tests.support.servers import Server, etcd_server

LEASE_S = Timing().lease_s
CHILD = "decode-child"

pytestmark = pytest.mark.slow


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Server]:
    with etcd_server(tmp_path) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="session")
async def stack(tmp_path: Path, etcd: Server) -> AsyncIterator[FrontStack]:
    async with front_stack(tmp_path, url=etcd.url, coalesce_ms=0) as running:
        running.script.answer = counted
        yield running


class Registry:
    """Decode workers as etcd's watchers see them: epochs by instance, and when that last changed."""

    def __init__(self, url: str) -> None:
        self.epochs: dict[str, int] = {}
        self.changed = asyncio.Condition()
        self._task = asyncio.create_task(self._follow(url))

    async def until(self, present: bool, within_s: float) -> None:
        async with asyncio.timeout(within_s), self.changed:
            await self.changed.wait_for(lambda: (CHILD in self.epochs) is present)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self, url: str) -> None:
        async for snapshot in open_discovery(url).members("decode"):
            async with self.changed:
                self.epochs = {member.instance: member.epoch for member in snapshot}
                self.changed.notify_all()


@pytest_asyncio.fixture(loop_scope="session")
async def registry(etcd: Server) -> AsyncIterator[Registry]:
    following = Registry(etcd.url)
    yield following
    await following.close()


async def decode_workers(stack: FrontStack) -> int:
    """Decode workers that the gateway would give work to."""
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)
        models = (await stub.ListModels(gateway_pb2.ListModelsRequest())).models
    return sum(model.decode_workers for model in models)


async def workers_become(stack: FrontStack, count: int, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while await decode_workers(stack) != count:  # noqa: ASYNC110  the gateway's view
            await asyncio.sleep(0.02)


@pytest.mark.promise(15)
async def test_a_killed_worker_leaves_etcd_with_its_lease(
    stack: FrontStack, etcd: Server, registry: Registry, tmp_path: Path, promise: Recorder
) -> None:
    async with worker_process(stack, tmp_path / "child.log", discovery=etcd.url) as child:
        await registry.until(True, 10.0)
        await drain_others(stack, draining=False)
        await workers_become(stack, 2, 10.0)
        child.kill()
        killed = time.monotonic()
        await workers_become(stack, 1, 5.0)
        unused_s = time.monotonic() - killed
        await registry.until(False, LEASE_S + 10.0)
        gone_s = time.monotonic() - killed
    promise(15, "killed decode in etcd: no new work after", unused_s, at_most=1.0, unit="s")
    promise(15, f"killed decode, lease {LEASE_S} s: out of etcd after", gone_s, at_most=LEASE_S + 1.0, unit="s")


@pytest.mark.promise(22)
async def test_a_worker_cut_off_from_etcd_leaves_and_returns_and_keeps_its_stream(
    stack: FrontStack, etcd: Server, registry: Registry, tmp_path: Path, promise: Recorder
) -> None:
    async with AsyncExitStack() as exits:
        proxy = await exits.enter_async_context(fault_proxy(etcd.url.removeprefix("etcd://")))
        there = f"etcd://{proxy.address}"
        await exits.enter_async_context(worker_process(stack, tmp_path / "child.log", pause_s=0.15, discovery=there))
        await registry.until(True, 10.0)
        await workers_become(stack, 1, 10.0)
        streaming = asyncio.create_task(stack.chat())  # 18 s on the child
        await asyncio.sleep(0.5)
        await drain_others(stack, draining=False)
        await workers_become(stack, 2, 10.0)
        proxy.faults = Faults(black_hole=True)
        cut = time.monotonic()
        await workers_become(stack, 1, LEASE_S + 10.0)
        left_s = time.monotonic() - cut
        assert CHILD not in registry.epochs and not streaming.done()
        assert (await streaming).status_code == 200
        assert len(stack.decodes[0].worker.watched.requests) == 0, "the stream moved though its worker was well"
        proxy.faults = Faults()
        healed = time.monotonic()
        await workers_become(stack, 2, 20.0)
        back_s = time.monotonic() - healed
    promise(22, f"cut off, lease {LEASE_S} s: out of the pool after", left_s, at_most=LEASE_S + 1.0, unit="s")
    promise(22, "healed: back in the pool after", back_s, at_most=LEASE_S, unit="s")
    known = "an epoch names memory and tickets, which no partition gives to others; the stream on it went on (ADR 20)"
    promise(22, "back with a new epoch", int(registry.epochs[CHILD] != EPOCH), exactly=1, reason=known)


@pytest.mark.promise(21)
async def test_serving_goes_on_while_etcd_is_away_for_30_s(
    stack: FrontStack, etcd: Server, registry: Registry, tmp_path: Path, promise: Recorder
) -> None:
    statuses, over = list[int](), asyncio.Event()
    stack.script.answer = lambda prompt: counted(prompt)[-8:]

    async def client() -> None:
        while not over.is_set():
            statuses.append((await stack.chat()).status_code)
            await asyncio.sleep(0.1)

    asking = [asyncio.create_task(client()) for _ in range(2)]
    etcd.kill()
    await asyncio.sleep(30.0)
    await asyncio.to_thread(etcd.start, keep_data=False)  # all that it knew is lost
    back = time.monotonic()
    async with AsyncExitStack() as exits:
        discovery = open_discovery(etcd.url)
        await fakeworkers.serve(exits, discovery, "decode", stack.script, "decode-new")
        await workers_become(stack, 2, 30.0)
        right_s = time.monotonic() - back
        over.set()
        await asyncio.gather(*asking)
    failed = len(statuses) - statuses.count(200)
    promise(21, f"etcd away for 30 s: of {len(statuses)} requests, failed", failed, exactly=0)
    promise(21, "empty etcd is back: a new worker gets work after", right_s, at_most=3.0, unit="s")
