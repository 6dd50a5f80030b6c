"""Requests end by their deadline, whatever the network does between the services (promises 11 and 12)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest

from fabric.server import Chassis
from protos.deepinfer.v1 import gateway_pb2, gateway_pb2_grpc
from services.gateway.build import build as build_gateway
from services.gateway.settings import GatewaySettings
from tests.support import bytemodel, fakeworkers
from tests.support.faultproxy import FaultProxy, Faults, fault_proxy
from tests.support.frontstack import FrontStack, front_stack, until
from tests.support.promises import Recorder

DEADLINE_S, SLACK_S = 1.0, 0.25
REQUESTS = 20
SICK = {
    "black hole": Faults(black_hole=True),
    "half open": Faults(half_open=True),
    "drip": Faults(drip_bytes_per_s=50),
}
INNER = ("recipe", "prefill", "decode")


@dataclass
class Sick:
    """A gateway that reaches everything through proxies, and is reached through two."""

    stack: FrontStack
    proxies: Mapping[str, FaultProxy]
    gateway: Chassis[Any]

    @property
    def idle(self) -> bool:
        """Whether no call runs at the gateway or a worker."""
        return self.stack.idle() and not self.gateway._in_flight.finite

    async def until_ready(self) -> None:
        async with asyncio.timeout(20.0), self.client() as client:
            while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110  the gateway's view
                await asyncio.sleep(0.05)

    def client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=f"http://{self.proxies['http'].address}", timeout=20.0)

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[Any]:
        async with grpc.aio.insecure_channel(self.proxies["grpc"].address) as channel:
            yield gateway_pb2_grpc.GatewayServiceStub(channel)


@asynccontextmanager
async def sick_stack(folder: Path) -> AsyncIterator[Sick]:
    """Answers take far longer than any deadline here: a request that ends well was not disturbed."""
    async with front_stack(folder) as stack, AsyncExitStack() as exits:
        stack.script.answer, stack.script.pause_s = (lambda prompt: [*bytemodel.encode("ab" * 300)]), 0.02
        workers = {"prefill": stack.prefills[0].address, "decode": stack.decodes[0].address}
        targets = workers | {"recipe": stack.recipe_address}
        proxies = {name: await exits.enter_async_context(fault_proxy(target)) for name, target in targets.items()}
        static = "static://" + ",".join(f"{name}={proxies[name].address}" for name in INNER)
        settings = GatewaySettings(
            discovery=static, http="127.0.0.1:0", request_timeout_s=DEADLINE_S, coalesce_ms=0, max_moves=100
        )
        gateway = Chassis(settings, build_gateway)
        exits.push_async_callback(gateway.close)
        ready = await gateway.start()
        for name, target in (("http", ready.http), ("grpc", ready.address)):
            proxies[name] = await exits.enter_async_context(fault_proxy(target))
        yield Sick(stack, proxies, gateway)


async def took(client: httpx2.AsyncClient, stack: FrontStack) -> float:
    """Seconds that one request took, however it ended."""
    began = time.monotonic()
    with suppress(httpx2.HTTPError):
        await client.post("/v1/chat/completions", json=stack.body(stream=True))
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.promise(11)
@pytest.mark.parametrize("edge", INNER)
async def test_requests_behind_a_sick_edge_end_by_their_deadline(tmp_path: Path, edge: str, promise: Recorder) -> None:
    """Half of them are under way when the edge falls ill, half come after."""
    longest = 0.0
    async with sick_stack(tmp_path) as sick:
        for faults in SICK.values():
            await sick.until_ready()
            async with sick.client() as client:
                early = [asyncio.create_task(took(client, sick.stack)) for _ in range(REQUESTS // 2)]
                await asyncio.sleep(0.3)
                sick.proxies[edge].faults = faults
                late = [asyncio.create_task(took(client, sick.stack)) for _ in range(REQUESTS // 2)]
                longest = max(longest, *await asyncio.gather(*early, *late))
            sick.proxies[edge].faults = Faults()
            sick.proxies[edge].cut()
    what = f"gateway-{edge}: {len(SICK)} faults x {REQUESTS} requests, past the deadline at most"
    promise(11, what, longest - DEADLINE_S, at_most=SLACK_S, unit="s")


async def ask_http(sick: Sick, client: httpx2.AsyncClient, stub: Any) -> None:
    """One request whose caller soon hears nothing any more."""
    with suppress(httpx2.HTTPError):
        await client.post("/v1/chat/completions", json=sick.stack.body(stream=True))


async def ask_grpc(sick: Sick, client: httpx2.AsyncClient, stub: Any) -> None:
    """The same over gRPC."""
    message = gateway_pb2.ChatMessage(role="user", content="x")
    request = gateway_pb2.ChatRequest(model=fakeworkers.MODEL, messages=[message])
    with suppress(grpc.aio.AioRpcError):
        async for _ in stub.Chat(request, timeout=DEADLINE_S):
            pass


@pytest.mark.slow
@pytest.mark.promise(11)
@pytest.mark.parametrize(("edge", "ask"), [("http", ask_http), ("grpc", ask_grpc)])
async def test_what_a_lost_client_asked_for_ends_by_its_deadline(
    tmp_path: Path, edge: str, ask: Callable[..., Any], promise: Recorder
) -> None:
    longest = 0.0
    async with sick_stack(tmp_path) as sick, sick.client() as client, sick.stub() as stub:
        for faults in SICK.values():
            await sick.until_ready()
            asking = [asyncio.create_task(ask(sick, client, stub)) for _ in range(REQUESTS)]
            decode = sick.stack.decodes[0].worker.watched
            await until(lambda decode=decode: decode.running >= 10, DEADLINE_S)
            began = time.monotonic()  # some of the requests have not come before now
            sick.proxies[edge].faults = faults
            await until(lambda: sick.idle, 20.0)
            longest = max(longest, time.monotonic() - began)
            sick.proxies[edge].faults = Faults()
            sick.proxies[edge].cut()
            await asyncio.gather(*asking)
    what = f"client-gateway, {edge}: {len(SICK)} faults x {REQUESTS} requests, past the deadline at most"
    promise(11, what, longest - DEADLINE_S, at_most=SLACK_S, unit="s")


@pytest.mark.promise(12)
@pytest.mark.parametrize(("asked_s", "given_s"), [(None, 120.0), (36_000.0, 3600.0), (7.0, 7.0)])
async def test_a_worker_sees_the_deadline_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_s: float | None, given_s: float, promise: Recorder
) -> None:
    seen: list[float] = []
    reserve = fakeworkers.FakeDecode.Reserve

    async def noting(self: Any, request: Any, context: Any) -> Any:
        seen.append(context.time_remaining())
        return await reserve(self, request, context)

    monkeypatch.setattr(fakeworkers.FakeDecode, "Reserve", noting)
    async with front_stack(tmp_path) as stack, grpc.aio.insecure_channel(stack.grpc) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        message = gateway_pb2.ChatMessage(role="user", content="x")
        async for _ in stub.Chat(gateway_pb2.ChatRequest(model=fakeworkers.MODEL, messages=[message]), timeout=asked_s):
            pass
    asked = "none" if asked_s is None else f"{asked_s:.0f} s"
    promise(12, f"deadline asked: {asked}; decode sees", seen[0], at_most=given_s, unit="s")
    promise(12, f"deadline asked: {asked}; lost on two hops", given_s - seen[0], at_most=1.0, unit="s")
