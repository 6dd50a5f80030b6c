"""Services that start in any order, etcd among them, serve soon after the last of them (promise 24)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import httpx2
import pytest

from fabric.discovery import open_discovery
from fabric.server import Chassis
from services.gateway.build import build as build_gateway
from services.gateway.settings import GatewaySettings
from services.recipe.service import build as build_recipe
from services.recipe.settings import RecipeSettings
from tests.support import bytemodel, fakeworkers
from tests.support.fakeworkers import Script
from tests.support.promises import Recorder
from tests.support.servers import Server, etcd_server

ORDERS, GAP_S, SERVING_S = 30, 0.5, 10.0


class Starting:
    """One stack whose parts are started one by one."""

    def __init__(self, folder: Path, etcd: Server, exits: AsyncExitStack) -> None:
        self._model, self._etcd, self._exits = folder / fakeworkers.MODEL, etcd, exits
        self.http = ""

    def parts(self) -> list[Callable[[], Awaitable[None]]]:
        return [self._start_etcd, self._start_recipe, self._start_gateway, self._start_prefill, self._start_decode]

    async def until_served(self) -> None:
        async with httpx2.AsyncClient(base_url=f"http://{self.http}", timeout=30.0) as client:
            async with asyncio.timeout(60.0):
                while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110  the gateway's view
                    await asyncio.sleep(0.02)
            body = {"model": fakeworkers.MODEL, "messages": [{"role": "user", "content": "hi"}]}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200

    async def _start_etcd(self) -> None:
        await asyncio.to_thread(self._etcd.start, keep_data=False)

    async def _start_recipe(self) -> None:
        recipe = Chassis(RecipeSettings(discovery=self._etcd.url, model=self._model), build_recipe)
        self._exits.push_async_callback(recipe.close)
        await recipe.start()

    async def _start_gateway(self) -> None:
        gateway = Chassis(GatewaySettings(discovery=self._etcd.url, http="127.0.0.1:0"), build_gateway)
        self._exits.push_async_callback(gateway.close)
        self.http = (await gateway.start()).http

    async def _start_prefill(self) -> None:
        await self._start_worker("prefill")

    async def _start_decode(self) -> None:
        await self._start_worker("decode")

    async def _start_worker(self, service: str) -> None:
        await fakeworkers.serve(self._exits, open_discovery(self._etcd.url), service, Script(), f"{service}-0")


@pytest.mark.slow
@pytest.mark.promise(24)
async def test_thirty_orders_of_starting_all_serve(tmp_path: Path, promise: Recorder) -> None:
    random, slowest = Random(24), 0.0
    bytemodel.write(tmp_path / fakeworkers.MODEL)
    with etcd_server(tmp_path) as etcd:
        for _ in range(ORDERS):
            etcd.kill()
            async with AsyncExitStack() as exits:
                starting = Starting(tmp_path, etcd, exits)
                parts, tasks = starting.parts(), []
                random.shuffle(parts)
                for part in parts:
                    tasks.append(asyncio.create_task(part()))
                    await asyncio.sleep(random.uniform(0, GAP_S))
                last = time.monotonic()
                await asyncio.gather(*tasks)
                await starting.until_served()
                slowest = max(slowest, time.monotonic() - last)
    promise(
        24,
        f"{ORDERS} orders, up to {GAP_S} s apart: served after the last start in",
        slowest,
        at_most=SERVING_S,
        unit="s",
    )
