"""Edges around the workers that fall ill: what uses them still ends by its deadline (promise 11)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.sampling.params import SamplingParams
from fabric.discovery import open_discovery
from fabric.errors import ServiceError
from protos.deepinfer.v1 import decode_pb2, kvstore_pb2, prefill_pb2
from tests.support.engines import runner_of
from tests.support.faultproxy import FaultProxy, Faults, fault_proxy
from tests.support.promises import Recorder
from tests.support.servers import PASSWORD, etcd_server, redis_server
from tests.support.stack import Stack, pack_sampling, worker_stack

DEADLINE_S, SLACK_S, PUSH_S = 1.0, 0.25, 2.0
REQUESTS = 20
SICK = [Faults(black_hole=True), Faults(half_open=True), Faults(drip_bytes_per_s=50)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPTS = [[3 + (number + 3 * index) % 500 for index in range(150)] for number in range(REQUESTS)]
TCP = "tcp://127.0.0.1:0"
ROOM = {"max_sequences": 64, "kv_memory_mb": 128}


@dataclass
class Edge:
    """Workers, the proxy on one edge, one request over it and the seconds that its call took, and who serves it."""

    stack: Stack
    proxy: FaultProxy
    request: Callable[[int], Awaitable[float]]
    server: str

    @property
    def working(self) -> bool:
        """Whether the server still answers a call, or computes for one."""
        answers = bool(self.stack.running[self.server].chassis._in_flight.finite)
        return answers or (self.server == "prefill" and runner_of(self.stack.servicer("prefill")).busy)

    @property
    def holding(self) -> bool:
        """Whether the server holds memory for calls that are over: of writes that nobody can take back."""
        return self.server == "prefill" and bool(self.stack.servicer("prefill").worker.unfinished)


async def prefill(stack: Stack, number: int) -> float:
    """One Prefill call to its end, whatever that is. Tickets are not this test's: what they hold is given back."""
    name, prompt = f"r{number}-{time.monotonic_ns()}", PROMPTS[number % REQUESTS]
    ticket = await stack.reserve(name, prompt, len(prompt) + GREEDY.max_tokens)
    began, call = time.monotonic(), stack.prefill.Prefill(timeout=DEADLINE_S)
    start = prefill_pb2.PrefillStart(
        request_id=name, token_ids=prompt, sampling=pack_sampling(GREEDY), salt=b"tenant", use_cache=True
    )
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(prefill_pb2.PrefillRequest(start=start))
        await call.write(prefill_pb2.PrefillRequest(attach=prefill_pb2.PrefillAttach(ticket=ticket)))
        async for _ in call:
            pass
    took_s = time.monotonic() - began
    await stack.release(ticket, decode_pb2.WRITER_STATE_FINISHED)
    return took_s


async def lookup(stack: Stack, number: int) -> float:
    began = time.monotonic()
    request = kvstore_pb2.LookupRequest(blocks=[kvstore_pb2.BlockName(key=bytes([number] * 32))])
    with suppress(grpc.aio.AioRpcError):
        await stack.kvstore.Lookup(request, timeout=DEADLINE_S)
    return time.monotonic() - began


@asynccontextmanager
async def link_edge(model: Path, folder: Path, side: str) -> AsyncIterator[Edge]:
    """What is written into the landings of `side`."""
    options = {"transport": TCP, "kvstore": side != "decode", "decode": ROOM, "prefill": {"push_timeout_s": PUSH_S}}
    async with worker_stack(model, **options) as stack:
        if side != "decode":
            for number in range(REQUESTS):
                await prefill(stack, number)
            await stack.idle()
            await stack.restart("prefill")  # its prompts are with the kvstore alone
        link = stack.running[side].servicer.core.link
        async with fault_proxy(link.address.url.removeprefix("tcp://")) as proxy:
            link.address = replace(link.address, url=f"tcp://{proxy.address}")
            yield Edge(stack, proxy, lambda number: prefill(stack, number), "prefill")


@asynccontextmanager
async def store_edge(model: Path, folder: Path) -> AsyncIterator[Edge]:
    """Prefill's calls of the kvstore."""
    async with worker_stack(model, transport=TCP) as first, AsyncExitStack() as exits:
        proxy = await exits.enter_async_context(fault_proxy(first.running["kvstore"].address))
        options = {"kvstore": True, "discovery": f"static://kvstore={proxy.address}"}
        stack = worker_stack(model, transport=TCP, kvstore=False, prefill=options, decode=ROOM)
        second = await exits.enter_async_context(stack)
        yield Edge(second, proxy, lambda number: prefill(second, number), "prefill")


@asynccontextmanager
async def redis_edge(model: Path, folder: Path) -> AsyncIterator[Edge]:
    """The kvstore's index."""
    with redis_server(folder) as redis:
        async with fault_proxy(f"127.0.0.1:{redis.port}") as proxy:
            url = f"redis://:{PASSWORD}@{proxy.address}/0"
            async with worker_stack(model, transport=TCP, store={"index": url}) as stack:
                yield Edge(stack, proxy, lambda number: lookup(stack, number), "kvstore")


EDGES: dict[str, Callable[[Path, Path], Any]] = {
    "prefill-decode link": lambda model, folder: link_edge(model, folder, "decode"),
    "kvstore-prefill link": lambda model, folder: link_edge(model, folder, "prefill"),
    "prefill-kvstore": store_edge,
    "kvstore-redis": redis_edge,
}


@pytest.mark.slow
@pytest.mark.promise(11)
@pytest.mark.parametrize("name", EDGES)
async def test_calls_behind_a_sick_edge_end_by_their_deadline(
    model: Path, tmp_path: Path, name: str, promise: Recorder
) -> None:
    """The end of the server's work counts as well: a caller is told by its own clock. What it can only wait for, blocks
    that a write under way still reads, it holds no longer than that write and the word about it may take."""
    longest = longest_work = longest_held = 0.0
    for faults in SICK:
        async with EDGES[name](model, tmp_path) as edge:
            await edge.request(0)
            edge.proxy.faults = faults
            began = time.monotonic()
            took = await asyncio.gather(*(edge.request(number) for number in range(REQUESTS)))
            longest = max(longest, *took)
            async with asyncio.timeout(60.0):
                while edge.working:  # noqa: ASYNC110  another party's counter
                    await asyncio.sleep(0.005)
                longest_work = max(longest_work, time.monotonic() - began)
                while edge.holding:  # noqa: ASYNC110  another party's counter
                    await asyncio.sleep(0.005)
                longest_held = max(longest_held, time.monotonic() - began)
            edge.proxy.faults = Faults()
            edge.proxy.cut()
            await edge.request(0)
    what = f"{name}: {len(SICK)} faults x {REQUESTS} calls, past the deadline at most"
    promise(11, what, max(0.0, longest - DEADLINE_S), at_most=SLACK_S, unit="s")
    what, late_s = f"{name}: the server's work, past the deadline at most", max(0.0, longest_work - DEADLINE_S)
    promise(11, what, late_s, at_most=SLACK_S, unit="s")
    if name == "prefill-decode link":
        what = f"{name}: blocks under a write given back, past the deadline at most"
        promise(11, what, max(0.0, longest_held - DEADLINE_S), at_most=2 * PUSH_S, unit="s")


@pytest.mark.slow
@pytest.mark.promise(11)
async def test_waiting_for_a_sick_etcd_ends_in_time(tmp_path: Path, promise: Recorder) -> None:
    longest = 0.0

    async def ready(url: str) -> float:
        began = time.monotonic()
        with suppress(ServiceError):
            await open_discovery(url).ready(DEADLINE_S)
        return time.monotonic() - began

    with etcd_server(tmp_path) as etcd:
        async with fault_proxy(etcd.url.removeprefix("etcd://")) as proxy:
            for faults in SICK:
                proxy.faults = faults
                longest = max(longest, *await asyncio.gather(*(ready(f"etcd://{proxy.address}") for _ in range(20))))
                proxy.faults = Faults()
                proxy.cut()
                assert await ready(f"etcd://{proxy.address}") < DEADLINE_S
    what = f"service-etcd: {len(SICK)} faults x {REQUESTS} calls, past the deadline at most"
    promise(11, what, max(0.0, longest - DEADLINE_S), at_most=SLACK_S, unit="s")
