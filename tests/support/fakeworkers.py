"""Prefill and decode workers without an engine: real gRPC, scripted tokens, gates and faults on every phase."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from engine.layout import Layout
from fabric.discovery import Discovery, MemberInfo
from fabric.errors import InvalidArgument, ServiceError
from fabric.interceptors import CallScope, InFlight
from fabric.server import SERVER_OPTIONS
from fabric.telemetry.metrics import Metrics
from fabric.wire import pack_layout
from protos.deepinfer.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from services.prefill.inbound import Inbound
from tests.support import bytemodel

MODEL = "bytes"


def model_info(revision: str = "r1") -> common_pb2.ModelInfo:
    """What both workers say they serve."""
    return common_pb2.ModelInfo(
        name=MODEL,
        revision=revision,
        family="fake",
        vocab_size=bytemodel.tokenizer().get_vocab_size(),
        max_context_tokens=bytemodel.CONTEXT_TOKENS,
        eos_token_ids=[bytemodel.EOS],
        layout=pack_layout(Layout(block_tokens=128, max_rollback=0, groups=())),
    )


@dataclass
class Script:
    """What the fake model says and how it misbehaves; shared by all workers of one stack.

    `answer` gives the output tokens for a prompt. A gate named in `gates` holds that phase until it is set; an error
    in `faults` is raised once it is reached. Phases: prefill, reserve, generate, token:N (before token N). `doom` gives
    the error of one request's life before one token, or None.
    """

    answer: Callable[[Sequence[int]], list[int]] = lambda prompt: [*bytemodel.encode("ok"), bytemodel.EOS]
    cached_tokens: int = 0
    batch_tokens: int = 1
    pause_s: float = 0.0
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    faults: dict[str, list[ServiceError]] = field(default_factory=dict)
    reached: dict[str, asyncio.Event] = field(default_factory=dict)
    doom: Callable[[decode_pb2.DecodeServiceGenerateRequest, int], ServiceError | None] = lambda request, index: None

    def output(self, opening: Any) -> list[int]:
        """The answer to the prompt of `opening`, whose emitted tokens must be its beginning."""
        cut = len(opening.token_ids) - opening.emitted_tokens
        tokens = self.answer(opening.token_ids[:cut])[: opening.sampling.max_tokens]
        if list(opening.token_ids[cut:]) != tokens[: opening.emitted_tokens]:
            raise InvalidArgument("not what was generated", field="token_ids", fix="send what was emitted")
        return tokens

    async def phase(self, name: str) -> None:
        self.reached.setdefault(name, asyncio.Event()).set()
        if gate := self.gates.get(name):
            await gate.wait()
        if faults := self.faults.get(name):
            raise faults.pop(0)

    def let_go(self) -> None:
        """Opens every gate and forgets all gates, faults and phases."""
        for gate in self.gates.values():
            gate.set()
        self.gates, self.faults, self.reached = {}, {}, {}

    async def wait_for(self, name: str) -> None:
        await self.reached.setdefault(name, asyncio.Event()).wait()


def forget(worker: FakePrefill | FakeDecode) -> None:
    """A worker's memory of earlier calls."""
    worker.watched.requests.clear()
    worker.watched.ends.clear()
    if isinstance(worker, FakeDecode):
        worker.reserves.clear()
        worker.released.clear()


class Watched:
    """Counts calls under way and told apart by their end."""

    def __init__(self) -> None:
        self.running = 0
        self.ends: Counter[str] = Counter()
        self.requests: list[Any] = []
        self.changed = asyncio.Condition()

    @asynccontextmanager
    async def call(self, request: Any = None) -> AsyncIterator[None]:
        self.running += 1
        if request is not None:
            self.requests.append(request)
        end = "ok"
        try:
            yield
        except asyncio.CancelledError:
            end = "cancelled"
            raise
        except ServiceError:
            end = "error"
            raise
        finally:
            self.running -= 1
            self.ends[end] += 1


class _Worker:
    def __init__(self, script: Script, instance: str, epoch: int, revision: str) -> None:
        self.script, self.instance, self.epoch = script, instance, epoch
        self.model = model_info(revision)
        self.status = common_pb2.WorkerStatus(
            instance=instance, epoch=epoch, sequence=1, blocks_total=1000, blocks_free=1000, keys_reset=True
        )
        self.watched = Watched()
        self._changed = asyncio.Condition()
        self._taken = 0

    async def report(self, **changes: Any) -> None:
        """Sends a new status to whoever watches."""
        fields = {name: getattr(self.status, name) for name in ("blocks_total", "blocks_free", "queued_tokens")}
        async with self._changed:
            self.status = common_pb2.WorkerStatus(
                instance=self.instance, epoch=self.epoch, sequence=self.status.sequence + 1, **(fields | changes)
            )
            self._changed.notify_all()

    async def heard(self) -> None:
        """Returns once a watcher has come back for more after the newest status: it has taken that one."""
        async with asyncio.timeout(20.0):
            async with self._changed:
                await self._changed.wait_for(lambda: self._taken == self.status.sequence)

    async def statuses(self) -> AsyncIterator[common_pb2.WorkerStatus]:
        seen = 0
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self.status.sequence > seen)  # noqa: B023
                current = self.status
            seen = current.sequence
            yield current
            async with self._changed:
                self._taken = seen
                self._changed.notify_all()


class FakePrefill(_Worker, prefill_pb2_grpc.PrefillServiceServicer):
    """Draws the script's first token."""

    async def Info(self, request: Any, context: Any) -> prefill_pb2.PrefillServiceInfoResponse:
        return prefill_pb2.PrefillServiceInfoResponse(
            model=self.model, instance=self.instance, epoch=self.epoch, max_prompt_tokens=bytemodel.CONTEXT_TOKENS - 1
        )

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillServiceWatchResponse]:
        async for status in self.statuses():
            yield prefill_pb2.PrefillServiceWatchResponse(status=status)

    async def Prefetch(self, request: Any, context: Any) -> prefill_pb2.PrefillServicePrefetchResponse:
        async with self.watched.call(request):
            await self.script.phase("prefetch")
            held = len(request.token_ids) - 1
            return prefill_pb2.PrefillServicePrefetchResponse(held_tokens=held, rising_tokens=held // 2)

    async def Prefill(self, messages: Any, context: Any) -> None:
        start = (await anext(messages)).start
        inbound = Inbound(messages)
        async with self.watched.call(start):
            await inbound.during(self._compute(start, inbound, context))

    async def _compute(self, start: prefill_pb2.PrefillStart, inbound: Inbound, context: Any) -> None:
        await context.write(prefill_pb2.PrefillResponse(queued=prefill_pb2.PrefillQueued()))
        await self.script.phase("prefill")
        ticket = await inbound.ticket
        await self.script.phase("push")
        first = self.script.output(start)[start.emitted_tokens]
        wants = start.sampling.HasField("logprobs")
        receipt = common_pb2.Receipt(
            ticket_id=ticket.id,
            request_id=start.request_id,
            epoch=ticket.epoch,
            tokens=len(start.token_ids),
            first_token=common_pb2.FirstToken(
                token_id=first, logprob=common_pb2.TokenLogprob(token_id=first, logprob=-0.5) if wants else None
            ),
        )
        usage = common_pb2.Usage(prompt_tokens=len(start.token_ids), cached_tokens=self.script.cached_tokens)
        done = prefill_pb2.PrefillDone(receipt=receipt, usage=usage)
        await context.write(prefill_pb2.PrefillResponse(done=done))


class FakeDecode(_Worker, decode_pb2_grpc.DecodeServiceServicer):
    """Streams the script's tokens; remembers tickets that are open and how they were released."""

    def __init__(self, script: Script, instance: str, epoch: int, revision: str) -> None:
        super().__init__(script, instance, epoch, revision)
        self.tickets: set[str] = set()
        self.released: dict[str, int] = {}
        self.reserves: list[decode_pb2.ReserveRequest] = []
        self._issued = 0

    async def Info(self, request: Any, context: Any) -> decode_pb2.DecodeServiceInfoResponse:
        return decode_pb2.DecodeServiceInfoResponse(
            model=self.model,
            instance=self.instance,
            epoch=self.epoch,
            max_total_tokens=bytemodel.CONTEXT_TOKENS,
            max_sequences=16,
        )

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[decode_pb2.DecodeServiceWatchResponse]:
        async for status in self.statuses():
            yield decode_pb2.DecodeServiceWatchResponse(status=status)

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveResponse:
        self.reserves.append(request)
        await self.script.phase("reserve")
        self._issued += 1
        ticket = common_pb2.Ticket(
            id=f"{self.instance}-{self._issued}",
            request_id=request.request_id,
            epoch=self.epoch,
            landings=[common_pb2.Landing()],
            layout=self.model.layout,
        )
        self.tickets.add(ticket.id)
        return decode_pb2.ReserveResponse(ticket=ticket)

    async def Generate(
        self, requests: AsyncIterator[decode_pb2.DecodeServiceGenerateRequest], context: Any
    ) -> AsyncIterator[decode_pb2.DecodeServiceGenerateResponse]:
        request = await anext(requests, None)
        receipt = await anext(requests, None)
        if request is None or receipt is None:
            return
        request.MergeFrom(receipt)
        async with self.watched.call(request):
            await self.script.phase("generate")
            tokens, finish = self._plan(request)
            for index in range(request.emitted_tokens, len(tokens), self.script.batch_tokens):
                await self.script.phase(f"token:{index}")
                if error := self.script.doom(request, index):
                    raise error
                batch = tokens[index : index + self.script.batch_tokens]
                last = index + len(batch) == len(tokens)
                if last:  # before it is told: a caller that has the end may cut the call
                    self.tickets.discard(request.ticket_id)
                yield self._batch(request, index, batch, finish if last else None)
                await asyncio.sleep(self.script.pause_s)

    async def Release(self, request: decode_pb2.ReleaseRequest, context: Any) -> decode_pb2.ReleaseResponse:
        self.released[request.ticket_id] = request.writer
        held = request.ticket_id in self.tickets
        self.tickets.discard(request.ticket_id)
        return decode_pb2.ReleaseResponse(released=held)

    def _plan(self, request: decode_pb2.DecodeServiceGenerateRequest) -> tuple[list[int], decode_pb2.DecodeFinish]:
        """All tokens of the answer and how it ends: at a stop string, at the length, or where the script ends."""
        tokens = self.script.output(request)
        reason, stop = common_pb2.FINISH_REASON_STOP, ""
        if tokens[-1] != bytemodel.EOS:
            reason = common_pb2.FINISH_REASON_LENGTH
        text = ""
        for count, token in enumerate(tokens, 1):
            text += bytemodel.tokenizer().decode([token], skip_special_tokens=False)
            found = [candidate for candidate in request.sampling.stop if candidate in text]
            if found:
                tokens, reason, stop = tokens[:count], common_pb2.FINISH_REASON_STOP, found[0]
                break
        return tokens, decode_pb2.DecodeFinish(reason=reason, stop=stop, completion_tokens=len(tokens))

    def _batch(
        self, request: Any, index: int, tokens: list[int], finish: decode_pb2.DecodeFinish | None
    ) -> decode_pb2.DecodeServiceGenerateResponse:
        wants = request.sampling.HasField("logprobs")
        logprobs = [common_pb2.TokenLogprob(token_id=token, logprob=-0.5) for token in tokens] if wants else []
        return decode_pb2.DecodeServiceGenerateResponse(
            first_index=index, token_ids=tokens, logprobs=logprobs, finish=finish
        )


@dataclass
class Served:
    """A fake worker on its port; `kill` ends it as SIGKILL would, while discovery still names it."""

    worker: Any
    server: Any
    address: str

    async def kill(self) -> None:
        await self.server.stop(0)

    @asynccontextmanager
    async def haunted(self) -> AsyncIterator[list[str]]:
        """The names of methods that are called at a killed worker's port from now on; none of them is answered."""
        calls = _Ghost()
        server = grpc.aio.server(handlers=[calls], options=list(SERVER_OPTIONS))
        server.add_insecure_port(self.address)
        await server.start()
        try:
            yield calls.names
        finally:
            await server.stop(0)


class _Ghost(grpc.GenericRpcHandler):
    def __init__(self) -> None:
        self.names: list[str] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> None:
        self.names.append(handler_call_details.method.rpartition("/")[2])


async def serve(
    stack: AsyncExitStack, discovery: Discovery, service: str, script: Script, instance: str, revision: str = "r1"
) -> Served:
    """Starts one fake worker and registers it until the stack closes."""
    kinds: dict[str, Any] = {"prefill": FakePrefill, "decode": FakeDecode}
    add = {
        "prefill": prefill_pb2_grpc.add_PrefillServiceServicer_to_server,
        "decode": decode_pb2_grpc.add_DecodeServiceServicer_to_server,
    }[service]
    worker = kinds[service](script, instance, 7, revision)
    server = grpc.aio.server(interceptors=[CallScope(Metrics(service), InFlight())], options=list(SERVER_OPTIONS))
    add(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stack.push_async_callback(server.stop, 0)
    member = MemberInfo(service, instance, f"127.0.0.1:{port}", 7, model=MODEL)
    await stack.enter_async_context(discovery.register(member))
    return Served(worker, server, member.address)
