"""How much of a handoff the computation hides: a real prefill process and a real decode service, one nano prompt.

Timed from the end of the last step that computes a prompt, in prefill's process, until decode has everything verified
and compared with the receipt; as a share of the time from the start of the first step. Both read the same monotonic
clock. The conductor here does what the gateway does: Reserve, Prefill, Generate.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop

from bench.table import Row
from engine.engine import Engine
from fabric.channels import Channels, call
from fabric.kvlink import ucx_lanes
from fabric.server import Chassis, Service
from fabric.wire import pack_layout
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from services.decode import service as decode_service
from services.decode.settings import DecodeSettings
from services.prefill import service as prefill_service
from services.prefill.settings import PrefillSettings

TOKENS, CHUNK = 4096, 512
BAR = 0.10
TIMEOUT_S = 60.0
_SAMPLING = common.SamplingParams(max_tokens=1, temperature=0.0)
_START_S = 180.0


@asynccontextmanager
async def served(settings: Any, build: Callable[[Any], Any]) -> AsyncIterator[tuple[str, Any]]:
    """Address and servicer of a service in this process, as its command would start it."""
    built: list[Service] = []

    @asynccontextmanager
    async def keeping(settings: Any) -> AsyncIterator[Service]:
        async with build(settings) as service:
            built.append(service)
            yield service

    chassis = Chassis(settings, keeping)
    ready = await chassis.start()
    try:
        yield ready.address, built[0].servicers[0][1]
    finally:
        await chassis.close()


class Steps:
    """Start and end of every engine step that computed something, as the engine's thread saw them."""

    def __init__(self, engine: Engine) -> None:
        self.spans: list[tuple[float, float]] = []
        self._step = engine.step
        engine.step = self._timed  # type: ignore[method-assign]

    def _timed(self) -> Any:
        started = time.monotonic()
        events = self._step()
        if events:
            self.spans.append((started, time.monotonic()))
        return events


def prefill(pipe: Connection) -> None:
    """The prefill process: its address first, then for every question the steps since the last one."""
    ucx_lanes.prepare()
    uvloop.run(_prefill(pipe))
    os._exit(0)  # destructors of the wheel's libraries may crash


async def _prefill(pipe: Connection) -> None:
    settings = PrefillSettings(discovery="memory://hidden", kvstore=False, chunk_tokens=CHUNK)
    async with served(settings, prefill_service.build) as (address, servicer):
        steps = Steps(servicer.core.engine.engine)
        pipe.send(address)
        while await asyncio.to_thread(pipe.recv):
            pipe.send(steps.spans)
            steps.spans = []


class Conductor:
    """One request at a time from a prompt to its verified KV and first token."""

    def __init__(self, channels: Channels, decode: tuple[str, Any], prefill_address: str) -> None:
        address, self._servicer = decode
        self._decode = channels.stub(decode_pb2_grpc.DecodeServiceStub, address)
        self._prefill = channels.stub(prefill_pb2_grpc.PrefillServiceStub, prefill_address)
        self.verified_s: list[float] = []
        desk = self._servicer.desk
        verify = desk.verify

        async def timed(*arguments: Any) -> None:
            await verify(*arguments)
            self.verified_s.append(time.monotonic())

        desk.verify = timed

    async def request(self, number: int, tokens: list[int]) -> None:
        """Returns when decode has finished the request. Raises grpc.aio.AioRpcError or RuntimeError."""
        request_id = f"hidden-{number}"
        ticket = await self._reserve(request_id, tokens)
        done = await self._computed(request_id, tokens, ticket)
        generate = decode_pb2.DecodeServiceGenerateRequest(
            ticket_id=ticket.id, request_id=request_id, token_ids=tokens, sampling=_SAMPLING, receipt=done.receipt
        )
        async for _ in self._decode.Generate([generate], timeout=TIMEOUT_S):
            pass

    async def _reserve(self, request_id: str, tokens: list[int]) -> common.Ticket:
        model = self._servicer.core.engine.engine.model
        request = decode_pb2.ReserveRequest(
            request_id=request_id,
            token_ids=tokens,
            max_total_tokens=len(tokens) + 1,
            salt=b"bench",
            layout=pack_layout(model.layout),
            model_revision=model.revision,
        )
        return (await call(self._decode.Reserve, request)).ticket

    async def _computed(self, request_id: str, tokens: list[int], ticket: common.Ticket) -> prefill_pb2.PrefillDone:
        start = prefill_pb2.PrefillStart(
            request_id=request_id, token_ids=tokens, sampling=_SAMPLING, salt=b"bench", use_cache=False
        )
        stream = self._prefill.Prefill(timeout=TIMEOUT_S)
        await stream.write(prefill_pb2.PrefillRequest(start=start))
        await stream.write(prefill_pb2.PrefillRequest(attach=prefill_pb2.PrefillAttach(ticket=ticket)))
        async for reply in stream:
            if reply.WhichOneof("progress") == "done":
                return reply.done
        raise RuntimeError("prefill ended without a receipt")


async def measure(rounds: int) -> list[Row]:
    """Rows of `rounds` prompts after one that warms up. Raises RuntimeError where prefill does not start."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=prefill, args=(there,))
    process.start()
    try:
        async with AsyncExitStack() as stack:
            settings = DecodeSettings(discovery="memory://hidden", chunk_tokens=CHUNK)
            decode = await stack.enter_async_context(served(settings, decode_service.build))
            if not await asyncio.to_thread(here.poll, _START_S):
                raise RuntimeError(f"prefill did not start within {_START_S} s")
            conductor = Conductor(await stack.enter_async_context(Channels()), decode, here.recv())
            vocabulary = decode[1].core.engine.engine.model.vocab_size
            shown = [await _round(conductor, here, number, vocabulary) for number in range(rounds + 1)][1:]
            here.send(False)
    finally:
        process.join(10)
        process.kill()
    prefills, tails = zip(*shown, strict=True)
    return [
        Row(f"nano, {TOKENS} tokens in chunks of {CHUNK}: prefill", 1e3 * statistics.median(prefills), "ms"),
        Row("  last chunk computed to verified, p50", 1e3 * statistics.median(tails), "ms"),
        Row("  not hidden, share of prefill", statistics.median(t / p for p, t in shown), "", BAR),
    ]


async def _round(conductor: Conductor, prefill: Connection, number: int, vocabulary: int) -> tuple[float, float]:
    """Seconds of one prefill, and from its end until decode had verified everything."""
    tokens = np.random.default_rng(number).integers(10, vocabulary, TOKENS).tolist()
    await conductor.request(number, tokens)
    prefill.send(True)
    spans = await asyncio.to_thread(prefill.recv)
    if len(spans) < TOKENS // CHUNK:
        raise RuntimeError(f"{len(spans)} steps for {TOKENS} tokens in chunks of {CHUNK}")
    return spans[-1][1] - spans[0][0], conductor.verified_s[-1] - spans[-1][1]
