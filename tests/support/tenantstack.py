"""The whole stack with API keys and a kvstore in one event loop, and its tenants as HTTP and gRPC clients."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import httpx2

from engine.sampling.params import SamplingParams
from fabric.server import Chassis, Service
from protos.deepinfer.v1 import gateway_pb2, gateway_pb2_grpc
from services.decode import service as decode_service
from services.decode.settings import DecodeSettings
from services.gateway.build import build as build_gateway
from services.gateway.settings import GatewaySettings
from services.gateway.tenants import hash_key
from services.kvstore import service as kvstore_service
from services.kvstore.settings import KvStoreSettings
from services.prefill import service as prefill_service
from services.prefill.settings import PrefillSettings
from services.recipe.service import build as build_recipe
from services.recipe.settings import RecipeSettings
from tests.support.engines import forget, held_by
from tests.support.frontstack import until
from tests.support.stack import pack_sampling
from tests.support.wholestack import WORKER

WORKERS = ("prefill", "decode")


@dataclass(frozen=True)
class Told:
    """What one answer told its client."""

    text: str
    usage: dict[str, Any]
    raw: bytes
    headers: dict[str, str] = field(default_factory=dict)
    took_s: float = 0.0  # from the question to the end of the answer

    @property
    def cached_tokens(self) -> int:
        """Each of the three places says the same."""
        cached = int(self.usage["prompt_tokens_details"]["cached_tokens"])
        assert self.usage["prompt_cache_hit_tokens"] == cached
        assert self.usage["prompt_cache_miss_tokens"] == self.usage["prompt_tokens"] - cached
        assert 0 <= cached < self.usage["prompt_tokens"]
        return cached


@dataclass
class TenantStack:
    """`servicers` by service; tenants are asked for by name, "key-NAME" is the key of each."""

    model: str
    client: httpx2.AsyncClient
    stub: gateway_pb2_grpc.GatewayServiceStub
    servicers: dict[str, Any]

    @property
    def tier(self) -> Any:
        """DRAM of the kvstore."""
        return self.servicers["kvstore"].store.tier

    async def chat(self, tenant: str, text: str, system: str = "", **fields: Any) -> Told:
        """One chat over HTTP, greedy and four tokens long."""
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": text})
        body = {"model": self.model, "messages": messages, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        headers = {"authorization": f"Bearer key-{tenant}"}
        began = time.perf_counter()
        reply = await self.client.post("/v1/chat/completions", json=body | fields, headers=headers)
        took_s = time.perf_counter() - began
        assert reply.status_code == 200, reply.text
        await self.settled()
        return replace(_streamed(reply) if fields.get("stream") else _whole(reply), took_s=took_s)

    async def prefetched(self, tenant: str, text: str) -> dict[str, Any]:
        """What a prefetch of the same chat tells."""
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        headers = {"authorization": f"Bearer key-{tenant}"}
        reply = await self.client.post("/v1/prefetch", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    async def generate(self, tenant: str, tokens: Sequence[int], sampling: SamplingParams) -> tuple[list[int], Any]:
        """Tokens and usage of one continuation over gRPC."""
        request = gateway_pb2.GatewayServiceGenerateRequest(
            model=self.model, token_ids=gateway_pb2.TokenIds(ids=tokens), sampling=pack_sampling(sampling)
        )
        answer, usage = [], None
        async for reply in self.stub.Generate(request, metadata=(("authorization", f"Bearer key-{tenant}"),)):
            answer += reply.token_ids
            usage = reply.finish.usage if reply.HasField("finish") else usage
        await self.settled()
        return answer, usage

    async def settled(self) -> None:
        """Returns once no request holds anything, and what the workers offered is stored or refused."""

        async def is_idle() -> bool:
            return not any([await held_by(self.servicers[name]) for name in WORKERS])

        await until(is_idle, 10.0)

    async def forget(self) -> None:
        """Empties the caches of both workers, so that only the store could tell."""
        for name in WORKERS:
            await forget(self.servicers[name])


@asynccontextmanager
async def tenant_stack(
    model: Path, folder: Path, tenants: Sequence[str], regions: Sequence[dict[str, Any]] = ()
) -> AsyncIterator[TenantStack]:
    """Starts everything over `model` and waits until the gateway is ready."""
    url = f"memory://{uuid4().hex}"
    everywhere = {"discovery": url, "transport": "inproc://"}
    worker = {"model": model, **everywhere, **WORKER}
    keys = folder / "keys"
    keys.write_text("".join(f"{name} {hash_key(f'key-{name}').hex()}\n" for name in tenants))
    gateway = GatewaySettings(discovery=url, http="127.0.0.1:0", keys_file=keys, regions=regions)
    starts: dict[str, tuple[Any, Any]] = {
        "recipe": (RecipeSettings(discovery=url, model=model), build_recipe),
        "kvstore": (KvStoreSettings(**everywhere, index="memory://", memory_mb=64), kvstore_service.build),
        "decode": (DecodeSettings(**worker), decode_service.build),
        "prefill": (PrefillSettings(**worker), prefill_service.build),
        "gateway": (gateway, build_gateway),
    }
    async with AsyncExitStack() as stack:
        servicers: dict[str, Any] = {}
        for name, (settings, build) in starts.items():
            ready, servicers[name] = await _start(stack, settings, build)
        client = httpx2.AsyncClient(base_url=f"http://{ready.http}", timeout=60.0)
        stack.push_async_callback(client.aclose)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(ready.address))
        running = TenantStack(model.name, client, gateway_pb2_grpc.GatewayServiceStub(channel), servicers)
        while (await client.get("/ready")).status_code != 200:
            pass
        yield running


async def _start(stack: AsyncExitStack, settings: Any, build: Any) -> tuple[Any, Any]:
    built: list[Service] = []

    @asynccontextmanager
    async def capturing(settings: Any) -> AsyncIterator[Service]:
        async with build(settings) as service:
            built.append(service)
            yield service

    chassis = Chassis(settings, capturing)
    stack.push_async_callback(chassis.close)
    return await chassis.start(), built[0].servicers[0][1]


def _whole(reply: httpx2.Response) -> Told:
    body = reply.json()
    return Told(body["choices"][0]["message"]["content"], body["usage"], reply.content, dict(reply.headers))


def _streamed(reply: httpx2.Response) -> Told:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    return Told(text, events[-1]["usage"], reply.content, dict(reply.headers))
