"""A gateway and a recipe as they are, with fake workers behind them, in one event loop over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2

from fabric.discovery import open_discovery
from fabric.server import Chassis
from services.gateway.build import build as build_gateway
from services.gateway.settings import GatewaySettings
from services.recipe.service import build as build_recipe
from services.recipe.settings import RecipeSettings
from tests.support import bytemodel, fakeworkers
from tests.support.fakeworkers import Script, Served


@dataclass
class FrontStack:
    """Addresses and the fakes behind them."""

    http: str
    grpc: str
    script: Script
    prefills: list[Served]
    decodes: list[Served]
    recipe: Any
    client: httpx2.AsyncClient
    discovery: str
    recipe_address: str

    def body(self, text: str = "hi", **extra: Any) -> dict[str, Any]:
        return {"model": fakeworkers.MODEL, "messages": [{"role": "user", "content": text}]} | extra

    async def chat(self, text: str = "hi", **extra: Any) -> httpx2.Response:
        return await self.client.post("/v1/chat/completions", json=self.body(text, **extra))

    def forget(self) -> None:
        """Back to the script and the counts of a fresh stack."""
        fresh = Script()
        self.script.let_go()
        self.script.answer, self.script.cached_tokens, self.script.doom = fresh.answer, fresh.cached_tokens, fresh.doom
        for served in (*self.prefills, *self.decodes):
            fakeworkers.forget(served.worker)

    def idle(self) -> bool:
        """Nothing runs at any worker and no ticket is held."""
        return not any(s.worker.watched.running for s in (*self.prefills, *self.decodes)) and not any(
            s.worker.tickets for s in self.decodes
        )

    async def until_idle(self, within_s: float) -> None:
        await until(self.idle, within_s)

    async def until_ready(self) -> None:
        """Waits until the gateway says that a request would be served; it may have lost a worker for a moment."""
        async with asyncio.timeout(10.0):
            while not await _is_ready(self.client):  # noqa: ASYNC110  another service decides: nothing to wait on
                await asyncio.sleep(0.02)


async def until(condition: Callable[[], bool | Awaitable[bool]], within_s: float) -> None:
    """Waits for something that tells nobody of its change, or only those who ask. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not (await met if isinstance(met := condition(), Awaitable) else met):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def events(text: str) -> list[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, without its [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@asynccontextmanager
async def front_stack(
    folder: Path, prefills: int = 1, decodes: int = 1, url: str = "", **settings: Any
) -> AsyncIterator[FrontStack]:
    """Starts everything and waits until the gateway is ready; `url` is where all find each other."""
    url = url or f"memory://{uuid4().hex}"
    bytemodel.write(folder / fakeworkers.MODEL)
    script = Script()
    async with AsyncExitStack() as stack:
        discovery = open_discovery(url)
        served = {
            side: [await fakeworkers.serve(stack, discovery, side, script, f"{side}-{i}") for i in range(count)]
            for side, count in (("prefill", prefills), ("decode", decodes))
        }
        recipe = Chassis(RecipeSettings(discovery=url, model=folder / fakeworkers.MODEL), build_recipe)
        stack.push_async_callback(recipe.close)
        recipe_ready = await recipe.start()
        gateway = Chassis(GatewaySettings(discovery=url, http="127.0.0.1:0", **settings), build_gateway)
        stack.push_async_callback(gateway.close)
        ready = await gateway.start()
        client = httpx2.AsyncClient(base_url=f"http://{ready.http}", timeout=30.0)
        stack.push_async_callback(client.aclose)
        workers = (served["prefill"], served["decode"])
        front = FrontStack(ready.http, ready.address, script, *workers, recipe, client, url, recipe_ready.address)
        await front.until_ready()
        yield front


async def _is_ready(client: httpx2.AsyncClient) -> bool:
    try:
        return (await client.get("/ready")).status_code == 200
    except httpx2.ConnectError:
        return False
