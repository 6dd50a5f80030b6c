"""Workers that are asked to stop, and a rolling restart of everything, lose no stream (promise 23)."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.sampling.params import SamplingParams
from protos.deepinfer.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.support import procs
from tests.support.oracle import Oracle
from tests.support.promises import Recorder
from tests.support.servers import etcd_server
from tests.support.wholestack import WORKER, whole_stack

STREAMS, GRACE_S = 50, 20.0
LONG = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
PROMPTS = [[3 + (number + 13 * index) % 250 for index in range(50 + number)] for number in range(5)]
HEALTH = health_pb2.HealthCheckResponse


@pytest.mark.slow
@pytest.mark.promise(23)
async def test_sigterm_of_a_decode_with_50_streams_drops_none(
    model: Path, oracle: Oracle, tmp_path: Path, promise: Recorder
) -> None:
    """Nobody else could take a stream that it drops."""
    expected = [await asyncio.to_thread(oracle.answer, prompt, LONG) for prompt in PROMPTS]
    begun, right = asyncio.Semaphore(0), 0
    options = ("--drain-s", str(GRACE_S), "--max-sequences", "64", "--failpoints", "decode.token=delay:0.05")

    async def stream(stack: Any, number: int) -> None:
        nonlocal right
        tokens: list[int] = []
        async for reply in stack.stream(PROMPTS[number % 5], LONG):
            if not tokens:
                begun.release()
            tokens += reply.token_ids
        right += tokens == expected[number % 5]

    async with (
        whole_stack(model, decodes=0, transport="ucx://") as stack,
        stack.worker_process("decode", tmp_path, *options) as (child, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        await stack.until_decodes(1)
        states = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await states.read()).status == HEALTH.SERVING
        running = [asyncio.create_task(stream(stack, number)) for number in range(STREAMS)]
        for _ in running:
            await begun.acquire()
        child.terminate()
        asked = time.monotonic()
        assert (await states.read()).status == HEALTH.NOT_SERVING
        told_s = time.monotonic() - asked
        assert sum(task.done() for task in running) < STREAMS // 2, "too late to see anything"
        await asyncio.gather(*running, return_exceptions=True)
        code = await asyncio.to_thread(child.wait, GRACE_S + 10.0)
        over_s = time.monotonic() - asked
    promise(23, "SIGTERM of decode: NOT_SERVING after", told_s, at_most=1.0, unit="s")
    promise(23, f"SIGTERM of decode: of {STREAMS} streams, dropped", STREAMS - right, exactly=0)
    promise(23, "SIGTERM of decode: gone after", over_s, at_most=GRACE_S, unit="s")
    promise(23, "SIGTERM of decode: exit code", code, exactly=0)


class Fleet:
    """Processes of every service around one etcd. `gateway` is where clients go."""

    def __init__(self, folder: Path, model: Path, discovery: str, exits: ExitStack) -> None:
        self._folder, self._exits = folder, exits
        common = ["--discovery", discovery]
        engine = [f"--{name.replace('_', '-')}={value}" for name, value in WORKER.items() if value is not True]
        worker = [*common, "--model", str(model), "--batch-invariant", *engine, "--transport", "tcp://127.0.0.1:0"]
        self._options = {
            "kvstore": [*common, "--index", "memory://", "--transport", "tcp://127.0.0.1:0"],
            "recipe": [*common, "--model", str(model)],
            "prefill": worker,
            "decode": worker,
            "gateway": [*common, "--http", "127.0.0.1:0"],
        }
        self._processes: dict[str, procs.Process] = {}
        self._starts = 0
        self.gateway = ""

    async def start(self, service: str) -> procs.Process | None:
        """The newest process of a service; returns the one that it replaces."""
        self._starts += 1
        folder = self._folder / f"start-{self._starts}"
        folder.mkdir()
        spawned = procs.service(service, folder, *self._options[service])
        process, ready = await asyncio.to_thread(self._exits.enter_context, spawned)
        old, self._processes[service] = self._processes.get(service), process
        if service == "gateway":
            self.gateway = ready["address"]
        return old


class Clients:
    """Chats without a pause, each with the gateway that is the newest when it begins."""

    def __init__(self, fleet: Fleet, model: str) -> None:
        self.answered, self.errors = 0, list[str]()
        self._fleet, self._over = fleet, asyncio.Event()
        message = gateway_pb2.ChatMessage(role="user", content="hello")
        sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        self._request = gateway_pb2.ChatRequest(model=model, messages=[message], sampling=sampling)
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(4)]

    async def stop(self) -> None:
        self._over.set()
        await asyncio.gather(*self._tasks)

    async def _ask(self) -> None:
        while not self._over.is_set():
            async with grpc.aio.insecure_channel(self._fleet.gateway) as channel:
                try:
                    async for _ in gateway_pb2_grpc.GatewayServiceStub(channel).Chat(self._request, timeout=60):
                        pass
                    self.answered += 1
                except grpc.aio.AioRpcError as error:
                    self.errors.append(f"{error.code()}: {error.details()}")


async def until_served(fleet: Fleet, workers: int) -> None:
    """Returns once the newest gateway would use so many workers of both kinds."""
    async with asyncio.timeout(30.0), grpc.aio.insecure_channel(fleet.gateway) as channel:
        stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)
        while True:
            models = (await stub.ListModels(gateway_pb2.ListModelsRequest())).models
            if models and models[0].prefill_workers + models[0].decode_workers == workers:
                return
            await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.promise(23)
async def test_a_rolling_restart_of_every_service_under_load_fails_no_request(
    model: Path, tmp_path: Path, promise: Recorder
) -> None:
    services = ("kvstore", "recipe", "prefill", "decode", "gateway")
    with ExitStack() as exits:
        etcd = exits.enter_context(etcd_server(tmp_path))
        fleet = Fleet(tmp_path, model, etcd.url, exits)
        for service in services:
            await fleet.start(service)
        await until_served(fleet, 2)
        clients = Clients(fleet, model.name)
        for service in services:
            old = await fleet.start(service)
            assert old is not None
            await until_served(fleet, 3 if service in ("prefill", "decode") else 2)
            old.terminate()
            assert await asyncio.to_thread(old.wait, 40.0) == 0, service
            await until_served(fleet, 2)
        await clients.stop()
    print(clients.errors)
    what = f"restart of {len(services)} services, {clients.answered} chats meanwhile: failed"
    promise(23, what, len(clients.errors), exactly=0)
    assert clients.answered > 20
