"""Worker services in one event loop: real gRPC on loopback, memory discovery. Conducts requests like a gateway."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from engine.sampling.params import SamplingParams
from engine.stats import EngineStats
from fabric.channels import Channels, call
from fabric.errors import from_rpc
from fabric.server import Chassis, Service
from fabric.telemetry import logs
from fabric.wire import pack_layout
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import decode_pb2, decode_pb2_grpc, kvstore_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from services.decode import service as decode_service
from services.decode.settings import DecodeSettings
from services.kvstore import service as kvstore_service
from services.kvstore.settings import KvStoreSettings
from services.prefill import service as prefill_service
from services.prefill.settings import PrefillSettings
from tests.support.engines import held_by, runner_of, stats_of


@dataclass(slots=True)
class Running:
    """One started service: its chassis, address and servicer."""

    chassis: Chassis[Any]
    address: str
    servicer: Any


@dataclass(slots=True)
class Answer:
    """What a request brought back."""

    tokens: list[int] = field(default_factory=list)
    finish: decode_pb2.DecodeFinish | None = None
    done: prefill_pb2.PrefillDone | None = None
    ticket: common.Ticket | None = None


class Stack:
    """The running workers. Addresses by role; `ask` runs one request through them."""

    def __init__(self, channels: Channels) -> None:
        self.channels = channels
        self.running: dict[str, Running] = {}
        self.writer: common.Incarnation | None = None  # whom reservations name, as the gateway does
        self._starts: dict[str, Callable[[], Awaitable[Running]]] = {}

    @property
    def prefill(self) -> prefill_pb2_grpc.PrefillServiceStub:
        return self.channels.stub(prefill_pb2_grpc.PrefillServiceStub, self.running["prefill"].address)

    @property
    def decode(self) -> decode_pb2_grpc.DecodeServiceStub:
        return self.channels.stub(decode_pb2_grpc.DecodeServiceStub, self.running["decode"].address)

    @property
    def kvstore(self) -> kvstore_pb2_grpc.KvStoreServiceStub:
        return self.channels.stub(kvstore_pb2_grpc.KvStoreServiceStub, self.running["kvstore"].address)

    def servicer(self, role: str) -> Any:
        """What a service does, in this process."""
        return self.running[role].servicer

    def engine(self, role: str) -> Any:
        """The engine inside a worker: for what it never changes; `stats` and tests.support.engines tell the rest."""
        return runner_of(self.servicer(role)).engine

    async def stats(self, role: str) -> EngineStats:
        return await stats_of(self.servicer(role))

    @property
    def desk(self) -> Any:
        return self.running["decode"].servicer.desk

    async def reserve(
        self, request_id: str, tokens: Sequence[int], total: int, use_cache: bool = True
    ) -> common.Ticket:
        model = self.engine("prefill").model
        request = decode_pb2.ReserveRequest(
            request_id=request_id,
            token_ids=tokens,
            max_total_tokens=total,
            salt=b"tenant",
            layout=pack_layout(model.layout),
            model_revision=model.revision,
            use_cache=use_cache,
            writer=self.writer,
        )
        return (await call(self.decode.Reserve, request)).ticket

    async def prefilled(
        self,
        request_id: str,
        tokens: Sequence[int],
        sampling: SamplingParams,
        ticket: common.Ticket,
        use_cache: bool = True,
    ) -> prefill_pb2.PrefillDone:
        """Runs prefill to its receipt."""
        async for reply in self.progress(request_id, tokens, sampling, ticket, use_cache):
            if reply.WhichOneof("progress") == "done":
                return reply.done
        raise AssertionError("prefill ended without a receipt")

    async def progress(
        self,
        request_id: str,
        tokens: Sequence[int],
        sampling: SamplingParams,
        ticket: common.Ticket | None,
        use_cache: bool = True,
        polite: bool = True,
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Everything prefill says; without a ticket none is attached. Left early, it sends cancel or cuts."""
        stream = self.prefill.Prefill(timeout=60)
        ended = False
        try:
            start = prefill_pb2.PrefillStart(
                request_id=request_id,
                token_ids=tokens,
                sampling=pack_sampling(sampling),
                salt=b"tenant",
                use_cache=use_cache,
            )
            await stream.write(prefill_pb2.PrefillRequest(start=start))
            if ticket is not None:
                await stream.write(prefill_pb2.PrefillRequest(attach=prefill_pb2.PrefillAttach(ticket=ticket)))
            async for reply in stream:
                yield reply
            ended = True
        except grpc.aio.AioRpcError as error:
            ended = True
            raise from_rpc(error) from error
        finally:
            if polite and not ended:
                await _say_cancel(stream)
            stream.cancel()

    def generate(
        self,
        request_id: str,
        tokens: Sequence[int],
        sampling: SamplingParams,
        ticket: common.Ticket,
        receipt: common.Receipt,
    ) -> Any:
        """The Generate call."""
        request = decode_pb2.DecodeServiceGenerateRequest(
            ticket_id=ticket.id,
            request_id=request_id,
            token_ids=tokens,
            sampling=pack_sampling(sampling),
            receipt=receipt,
        )
        return self.decode.Generate([request], timeout=60)

    async def ask(
        self, tokens: Sequence[int], sampling: SamplingParams, request_id: str = "", use_cache: bool = True
    ) -> Answer:
        """One request, as the gateway conducts it. Raises ServiceError."""
        request_id = request_id or uuid.uuid4().hex
        answer = Answer()
        answer.ticket = await self.reserve(request_id, tokens, len(tokens) + sampling.max_tokens, use_cache)
        answer.done = await self.prefilled(request_id, tokens, sampling, answer.ticket, use_cache)
        try:
            async for reply in self.generate(request_id, tokens, sampling, answer.ticket, answer.done.receipt):
                assert reply.first_index == len(answer.tokens)
                answer.tokens += reply.token_ids
                if reply.HasField("finish"):
                    answer.finish = reply.finish
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from error
        return answer

    async def release(self, ticket: common.Ticket, writer: decode_pb2.WriterState) -> bool:
        request = decode_pb2.ReleaseRequest(ticket_id=ticket.id, writer=writer)
        return bool((await call(self.decode.Release, request)).released)

    async def idle(self, timeout_s: float = 10.0) -> None:
        """Returns once nobody holds blocks, slots, tickets or landings. Raises AssertionError naming what is left."""
        async with asyncio.timeout(timeout_s + 1):
            for _ in range(round(timeout_s * 100)):
                left = await self.left()
                if not left:
                    return
                await asyncio.sleep(0.01)
        raise AssertionError(f"still held: {left}")

    async def left(self) -> dict[str, int]:
        """What is held now."""
        held: dict[str, int] = {}
        for role in ("prefill", "decode"):
            held |= {f"{role} {name}": count for name, count in (await held_by(self.servicer(role))).items()}
        landings = self.desk._landings.stats()
        held["tickets"] = len(self.desk._book)
        held["landings"] = landings.granted + landings.quarantined + landings.retired
        return {name: count for name, count in held.items() if count}

    async def start(self, role: str, settings: Any, build: Any) -> None:
        """Starts a service, and remembers how."""
        self._starts[role] = partial(_start, settings, build)
        self.running[role] = await self._starts[role]()

    async def stop(self, role: str) -> None:
        """Ends one service as a crash would for its peers: without a drain."""
        await self.running.pop(role).chassis.close()

    async def restart(self, role: str) -> None:
        """A new incarnation with empty memory, also of one that was stopped."""
        if role in self.running:
            await self.stop(role)
        self.running[role] = await self._starts[role]()

    async def close(self) -> None:
        for role in reversed(list(self.running)):
            await self.stop(role)


@asynccontextmanager
async def worker_stack(
    model: Path,
    *,
    transport: str = "inproc://",
    kvstore: bool = True,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    store: dict[str, Any] | None = None,
) -> AsyncIterator[Stack]:
    """prefill, decode and (unless told otherwise) kvstore over `model`; the dictionaries override their settings."""
    logs.configure("test", "test", "warning")
    everywhere = {"discovery": f"memory://{uuid.uuid4().hex}", "transport": transport}
    worker = {"model": model, "batch_invariant": True, "kv_memory_mb": 64, "landing_mb": 32, "chunk_tokens": 128}
    async with AsyncExitStack() as stack:
        running = Stack(await stack.enter_async_context(Channels()))
        stack.push_async_callback(running.close)
        if kvstore:
            settings = KvStoreSettings(**{"index": "memory://", "memory_mb": 64, **everywhere, **(store or {})})
            await running.start("kvstore", settings, kvstore_service.build)
        decode_settings = DecodeSettings(**{**worker, **everywhere, **(decode or {})})
        await running.start("decode", decode_settings, decode_service.build)
        prefill_settings = PrefillSettings(**{**worker, **everywhere, "kvstore": kvstore, **(prefill or {})})
        await running.start("prefill", prefill_settings, prefill_service.build)
        yield running


async def _say_cancel(stream: Any) -> None:
    """Returns when prefill has ended the stream: then it writes no more."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await stream.write(prefill_pb2.PrefillRequest(cancel=prefill_pb2.PrefillCancel()))
        async for _ in stream:
            pass


async def _start(settings: Any, build: Any) -> Running:
    built: list[Service] = []

    @asynccontextmanager
    async def capturing(settings: Any) -> AsyncIterator[Service]:
        async with build(settings) as service:
            built.append(service)
            yield service

    chassis = Chassis(settings, capturing)
    ready = await chassis.start()
    return Running(chassis, ready.address, built[0].servicers[0][1])


def pack_sampling(sampling: SamplingParams) -> common.SamplingParams:
    """The protobuf form of the engine's parameters."""
    values = {name: getattr(sampling, name) for name in SamplingParams.__slots__}
    return common.SamplingParams(**{name: value for name, value in values.items() if value is not None})
