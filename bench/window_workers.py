"""A kvstore, a decode and a prefill worker in one event loop, asked as a gateway asks them. Times first tokens.

Real gRPC on loopback, UCX, the settings' defaults but for the size of prefill's own cache: it holds one prompt, so that
another one in between leaves nothing but what the kvstore has.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from engine.layout import Layout
from fabric.channels import Channels, call
from fabric.server import Chassis, Service
from fabric.telemetry import logs
from fabric.wire import pack_layout
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    kvstore_pb2,
    kvstore_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from services.decode import service as decode_service
from services.decode.settings import DecodeSettings
from services.kvstore import service as kvstore_service
from services.kvstore.settings import KvStoreSettings
from services.prefill import service as prefill_service
from services.prefill.settings import PrefillSettings

_SALT = b"bench"
_TIMEOUT_S = 60.0
_SEQUENCES = 2
_SPARE_BLOCKS = 3
_LOOK_S = 0.005
Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class First:
    """One prompt, from its reservation to the receipt with its first token."""

    seconds: float
    token: int
    cached_tokens: int
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class Started:
    address: str
    servicer: Any


class Workers:
    """The three running workers."""

    def __init__(self, channels: Channels, store: Started, decode: Started, prefill: Started) -> None:
        self._decode = channels.stub(decode_pb2_grpc.DecodeServiceStub, decode.address)
        self._prefill = channels.stub(prefill_pb2_grpc.PrefillServiceStub, prefill.address)
        self._store = channels.stub(kvstore_pb2_grpc.KvStoreServiceStub, store.address)
        self._engines = [started.servicer.core.engine.engine for started in (prefill, decode)]

    @property
    def layout(self) -> Layout:
        """As prefill serves it."""
        layout: Layout = self._engines[0].model.layout
        return layout

    async def first_token(self, tokens: Tokens) -> First:
        """Reserve, prefill, release; then waits until everything is stored and nobody holds anything."""
        engine, request_id = self._engines[0], uuid.uuid4().hex
        computed, started = engine.stats().computed_tokens, time.perf_counter()
        ticket = await self._reserve(request_id, tokens)
        done = await self._prefilled(request_id, tokens, ticket)
        seconds = time.perf_counter() - started
        finished = decode_pb2.WRITER_STATE_FINISHED
        await call(self._decode.Release, decode_pb2.ReleaseRequest(ticket_id=ticket.id, writer=finished))
        await self._idle()
        usage = done.usage.cached_tokens
        return First(seconds, done.receipt.first_token.token_id, usage, engine.stats().computed_tokens - computed)

    async def stored_bytes(self) -> int:
        """Bytes of every record in the kvstore."""
        return int((await call(self._store.Info, kvstore_pb2.KvStoreServiceInfoRequest())).used_bytes)

    async def _reserve(self, request_id: str, tokens: Tokens) -> common.Ticket:
        """Decode uses nothing of its own, so that every prompt is pushed whole."""
        model = self._engines[0].model
        request = decode_pb2.ReserveRequest(
            request_id=request_id,
            token_ids=tokens,
            max_total_tokens=len(tokens) + 1,
            salt=_SALT,
            layout=pack_layout(model.layout),
            model_revision=model.revision,
            use_cache=False,
        )
        ticket: common.Ticket = (await call(self._decode.Reserve, request)).ticket
        return ticket

    async def _prefilled(self, request_id: str, tokens: Tokens, ticket: common.Ticket) -> prefill_pb2.PrefillDone:
        stream = self._prefill.Prefill(timeout=_TIMEOUT_S)
        sampling = common.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        start = prefill_pb2.PrefillStart(
            request_id=request_id, token_ids=tokens, sampling=sampling, salt=_SALT, use_cache=True
        )
        await stream.write(prefill_pb2.PrefillRequest(start=start))
        await stream.write(prefill_pb2.PrefillRequest(attach=prefill_pb2.PrefillAttach(ticket=ticket)))
        async for reply in stream:
            if reply.WhichOneof("progress") == "done":
                done: prefill_pb2.PrefillDone = reply.done
                return done
        raise RuntimeError("prefill ended without a receipt")

    async def _idle(self) -> None:
        deadline = time.perf_counter() + _TIMEOUT_S
        while any(engine.stats().blocks_held or engine.stats().slots_held for engine in self._engines):
            if time.perf_counter() > deadline:
                raise RuntimeError(f"blocks are still held after {_TIMEOUT_S} s")
            await asyncio.sleep(_LOOK_S)


@asynccontextmanager
async def open_workers(
    model: Path, window_state: str, threads: int, layout: Layout, tokens: int
) -> AsyncIterator[Workers]:
    """The workers over `model`, prefill with room for one prompt of `tokens` tokens and little more."""
    everywhere: dict[str, Any] = {"discovery": f"memory://{uuid.uuid4().hex}", "transport": "ucx://"}
    worker = everywhere | {"model": model, "window_state": window_state, "max_sequences": _SEQUENCES}
    slots = (2 * _SEQUENCES + 16) * layout.window_bytes
    own = slots + (layout.blocks_for(tokens) + _SPARE_BLOCKS) * layout.block_bytes
    settings: dict[str, Any] = {
        "store": KvStoreSettings(index=SecretStr("memory://"), **everywhere),
        "decode": DecodeSettings(**worker, threads=1),
        "prefill": PrefillSettings(**worker, threads=threads, kv_memory_mb=-(-own // 2**20)),
    }
    logs.configure("bench", "bench", "warning")
    builds: dict[str, Callable[[Any], Any]] = {
        "store": kvstore_service.build,
        "decode": decode_service.build,
        "prefill": prefill_service.build,
    }
    async with AsyncExitStack() as stack:
        channels = await stack.enter_async_context(Channels())
        started = {role: await _start(stack, settings[role], build) for role, build in builds.items()}
        yield Workers(channels, started["store"], started["decode"], started["prefill"])


async def _start(stack: AsyncExitStack, settings: Any, build: Callable[[Any], Any]) -> Started:
    built: list[Service] = []

    @asynccontextmanager
    async def kept(settings: Any) -> AsyncIterator[Service]:
        async with build(settings) as service:
            built.append(service)
            yield service

    chassis: Chassis[Any] = Chassis(settings, kept)
    ready = await chassis.start()
    stack.push_async_callback(chassis.close)
    return Started(ready.address, built[0].servicers[0][1])
