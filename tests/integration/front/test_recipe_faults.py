"""A recipe service in a process of its own that is killed or frozen (promises 16 and 20)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from fabric.server import Chassis
from services.gateway.build import build as build_gateway
from services.gateway.settings import GatewaySettings
from tests.support import bytemodel, fakeworkers, procs
from tests.support.frontstack import FrontStack, front_stack, until
from tests.support.promises import Recorder


@dataclass
class Remote:
    """A gateway whose only recipe is a child."""

    stack: FrontStack
    child: procs.Process
    client: httpx2.AsyncClient

    async def chat(self, **extra: object) -> httpx2.Response:
        return await self.client.post("/v1/chat/completions", json=self.stack.body(**extra))

    async def until_status(self, status: int, within_s: float) -> None:
        """Returns once /ready says so."""
        async with asyncio.timeout(within_s):
            while (await self.client.get("/ready")).status_code != status:  # noqa: ASYNC110  the gateway's view
                await asyncio.sleep(0.01)


@asynccontextmanager
async def remote_recipe(folder: Path) -> AsyncIterator[Remote]:
    model = folder / fakeworkers.MODEL
    command = procs.python("-m", "services.recipe", "--discovery", "memory://child", "--model", str(model))
    async with front_stack(folder) as stack:
        tokens = [*bytemodel.encode("</think>" + "abcd" * 40), bytemodel.EOS]
        stack.script.answer, stack.script.pause_s = (lambda prompt: tokens), 0.03
        with procs.spawn(command, folder / "recipe.log") as child:
            recipe = (await asyncio.to_thread(child.json, 60.0))["address"]
            prefill, decode = stack.prefills[0].address, stack.decodes[0].address
            static = f"static://recipe={recipe},prefill={prefill},decode={decode}"
            gateway = Chassis(GatewaySettings(discovery=static, http="127.0.0.1:0"), build_gateway)
            try:
                ready = await gateway.start()
                async with httpx2.AsyncClient(base_url=f"http://{ready.http}", timeout=30.0) as client:
                    remote = Remote(stack, child, client)
                    await remote.until_status(200, 10.0)
                    yield remote
            finally:
                await gateway.close()


@pytest.mark.slow
@pytest.mark.promise(16)
async def test_a_frozen_recipe_is_noticed_and_comes_back(tmp_path: Path, promise: Recorder) -> None:
    async with remote_recipe(tmp_path) as remote:
        asking = asyncio.create_task(remote.chat(stream=True))
        decode = remote.stack.decodes[0].worker
        await until(lambda: bool(decode.watched.running), 5.0)
        await asyncio.to_thread(remote.child.freeze)
        frozen = time.monotonic()
        noticing = asyncio.create_task(remote.until_status(503, 15.0))
        reply = await asking
        ended_s = time.monotonic() - frozen
        await noticing
        noticed_s = time.monotonic() - frozen
        assert '"error"' in reply.text and (await remote.chat()).status_code == 503
        await asyncio.to_thread(remote.child.thaw)
        await remote.until_status(200, 10.0)
        assert (await remote.chat()).status_code == 200
        await remote.stack.until_idle(2.0)
    promise(16, "frozen recipe: its stream ends after", ended_s, at_most=3.0, unit="s")
    promise(16, "frozen recipe: no new work after", noticed_s, at_most=2.0, unit="s")


@pytest.mark.promise(20)
async def test_without_a_recipe_chats_are_refused_at_once(tmp_path: Path, promise: Recorder) -> None:
    async with remote_recipe(tmp_path) as remote:
        remote.child.kill()
        killed, slowest, statuses = time.monotonic(), 0.0, list[int]()
        while time.monotonic() - killed < 1.0:
            began = time.monotonic()
            statuses.append((await remote.chat()).status_code)
            slowest = max(slowest, time.monotonic() - began)
    assert set(statuses) == {503}
    promise(20, f"killed recipe: {len(statuses)} chats are refused (503) within", slowest, at_most=1.0, unit="s")
