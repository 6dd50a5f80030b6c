"""The whole stack around a tiny model with a byte tokenizer: gateway, recipe, prefill and decodes in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
from tokenizers import AddedToken, Tokenizer

from engine.families.v4.tiny import TINY, TinySpec, write_tiny
from engine.sampling.params import SamplingParams
from fabric.discovery import MemberInfo, open_discovery
from fabric.server import Chassis, Service
from protos.deepinfer.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from services.decode import service as decode_service
from services.decode.settings import DecodeSettings
from services.gateway.build import build as build_gateway
from services.gateway.settings import GatewaySettings
from services.kvstore.service import build as build_kvstore
from services.kvstore.settings import KvStoreSettings
from services.prefill import service as prefill_service
from services.prefill.settings import PrefillSettings
from services.recipe.service import build as build_recipe
from services.recipe.settings import RecipeSettings
from tests.support import bytemodel, procs
from tests.support.engines import held_by
from tests.support.remote import process_id
from tests.support.stack import pack_sampling

WORKER = {"batch_invariant": True, "kv_memory_mb": 64, "landing_mb": 32, "chunk_tokens": 128}


def write_model(folder: Path) -> Path:
    """A tiny V4 whose tokenizer is bytes, control tokens, and as many unused ones as its vocabulary has room for."""
    write_tiny(folder, TinySpec())
    built = Tokenizer.from_str(bytemodel.tokenizer().to_str())
    unused = range(int(TINY["vocab_size"]) - built.get_vocab_size())
    built.add_special_tokens([AddedToken(f"<|unused {index}|>", special=True, normalized=False) for index in unused])
    built.save(str(folder / "tokenizer.json"))
    return folder


@dataclass
class Answer:
    """One answer as the client got it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: gateway_pb2.Finish | None = None


@dataclass
class WholeStack:
    """The gateway's stub, and the servicers of the workers in this process."""

    model: Path
    stub: Any
    discovery: str
    transport: str
    workers: dict[str, Any]
    addresses: list[tuple[str, str]]  # service, host:port
    services: AsyncExitStack

    async def stream(self, tokens: Sequence[int], sampling: SamplingParams) -> AsyncGenerator[Any, None]:
        """The replies to one prompt; their indexes are dense. Closed early, it leaves."""
        request = gateway_pb2.GatewayServiceGenerateRequest(
            model=self.model.name, token_ids=gateway_pb2.TokenIds(ids=tokens), sampling=pack_sampling(sampling)
        )
        due, call = 0, self.stub.Generate(request, timeout=60)
        try:
            async for reply in call:
                assert reply.first_index == due
                due += len(reply.token_ids)
                yield reply
        finally:
            call.cancel()

    async def ask(self, tokens: Sequence[int], sampling: SamplingParams) -> Answer:
        answer = Answer()
        async for reply in self.stream(tokens, sampling):
            answer.tokens += reply.token_ids
            answer.logprobs += [logprob.logprob for logprob in reply.logprobs]
            answer.finish = reply.finish if reply.HasField("finish") else None
        return answer

    async def held(self) -> dict[str, int]:
        """What the workers of this process hold now."""
        left: dict[str, int] = {}
        for name, servicer in self.workers.items():
            left |= {f"{name} {what}": count for what, count in (await held_by(servicer)).items()}
            if name.startswith("decode"):
                left[f"{name} tickets"] = servicer.desk.open
        return {what: count for what, count in left.items() if count}

    async def until_idle(self, within_s: float) -> None:
        """Raises AssertionError naming what is still held."""
        for _ in range(round(within_s * 100)):
            held = await self.held()
            if not held:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"still held: {held}")

    async def until_decodes(self, count: int) -> None:
        """Returns once the gateway would use `count` decode workers."""
        await self.until_workers("decode", count)

    async def until_workers(self, service: str, count: int) -> None:
        """Returns once the gateway would use `count` workers of that kind."""
        async with asyncio.timeout(20.0):
            while await self._workers(service) != count:  # noqa: ASYNC110  the gateway's view
                await asyncio.sleep(0.02)

    async def _workers(self, service: str) -> int:
        models = (await self.stub.ListModels(gateway_pb2.ListModelsRequest())).models
        return sum(getattr(model, f"{service}_workers") for model in models)

    async def start_decode(self, **settings: Any) -> None:
        """One more decode worker in this process."""
        common = {"model": self.model, "discovery": self.discovery, "transport": self.transport, **WORKER}
        address, servicer = await start(self.services, DecodeSettings(**common, **settings), decode_service.build)
        self.workers[f"decode-{len(self.workers) - 1}"] = servicer
        self.addresses.append(("decode", address))

    @asynccontextmanager
    async def gateway_process(self, log_dir: Path) -> AsyncIterator[tuple[procs.Process, WholeStack]]:
        """One more gateway, in a process of its own, and this stack as seen through it."""
        discovery = "static://" + ",".join(f"{service}={address}" for service, address in self.addresses)
        command = procs.python("-m", "services.gateway", "--discovery", discovery, "--http", "127.0.0.1:0")
        with procs.spawn([*command, "--coalesce-ms", "0"], log_dir / "gateway.log") as child:
            address = (await asyncio.to_thread(child.json, 60.0))["address"]
            async with grpc.aio.insecure_channel(address) as channel:
                seen = replace(self, stub=gateway_pb2_grpc.GatewayServiceStub(channel))
                await seen.until_decodes(sum(service == "decode" for service, _ in self.addresses))
                yield child, seen

    @asynccontextmanager
    async def decode_process(self, log_dir: Path, *arguments: str) -> AsyncIterator[procs.Process]:
        """One more decode worker, in a process of its own, as the gateway sees it from here on."""
        async with self.worker_process("decode", log_dir, *arguments) as (child, _):
            yield child

    @asynccontextmanager
    async def worker_process(
        self, service: str, log_dir: Path, *arguments: str
    ) -> AsyncIterator[tuple[procs.Process, str]]:
        """One more prefill or decode worker, in a process of its own, and its address."""
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in WORKER.items() if value is not True]
        flags += ["--no-kvstore"] if service == "prefill" else []
        command = procs.python(
            *("-m", f"services.{service}", "--model", str(self.model), "--discovery", "memory://child"),
            *("--transport", self.transport, "--batch-invariant", *flags, *arguments),
        )
        with procs.spawn(command, log_dir / f"{service}.log") as child:
            address = (await asyncio.to_thread(child.json, 60.0))["address"]
            member = await _member(service, address, process_id(child.pid))
            async with open_discovery(self.discovery).register(member):
                yield child, address


async def _member(service: str, address: str, process: str) -> MemberInfo:
    async with grpc.aio.insecure_channel(address) as channel:
        if service == "decode":
            info = await decode_pb2_grpc.DecodeServiceStub(channel).Info(decode_pb2.DecodeServiceInfoRequest())
        else:
            info = await prefill_pb2_grpc.PrefillServiceStub(channel).Info(prefill_pb2.PrefillServiceInfoRequest())
    return MemberInfo(service, info.instance, address, info.epoch, model=info.model.name, process=process)


@asynccontextmanager
async def whole_stack(
    model: Path, decodes: int = 2, transport: str = "inproc://", kvstore: bool = False, **gateway: Any
) -> AsyncIterator[WholeStack]:
    """Starts everything over `model`, with a kvstore if asked for, and waits until the gateway uses all of it."""
    url = f"memory://{uuid4().hex}"
    common = {"model": model, "discovery": url, "transport": transport, **WORKER}
    async with AsyncExitStack() as stack:
        workers: dict[str, Any] = {}
        recipe, _ = await start(stack, RecipeSettings(discovery=url, model=model), build_recipe)
        if kvstore:
            store = KvStoreSettings(discovery=url, transport=transport, index="memory://", memory_mb=64)
            await start(stack, store, build_kvstore)
        prefill_settings = PrefillSettings(**common, kvstore=kvstore)
        prefill, workers["prefill"] = await start(stack, prefill_settings, prefill_service.build)
        addresses = [("recipe", recipe), ("prefill", prefill)]
        settings = GatewaySettings(discovery=url, http="127.0.0.1:0", coalesce_ms=0, **gateway)
        address, _ = await start(stack, settings, build_gateway)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        running = WholeStack(model, stub, url, transport, workers, addresses, stack)
        for _ in range(decodes):
            await running.start_decode()
        await running.until_decodes(decodes)
        yield running


async def start(stack: AsyncExitStack, settings: Any, build: Any) -> tuple[str, Any]:
    """Address and servicer of one service."""
    built: list[Service] = []

    @asynccontextmanager
    async def capturing(settings: Any) -> AsyncIterator[Service]:
        async with build(settings) as service:
            built.append(service)
            yield service

    chassis = Chassis(settings, capturing)
    stack.push_async_callback(chassis.close)
    ready = await chassis.start()
    return ready.address, built[0].servicers[0][1]
