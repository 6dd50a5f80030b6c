"""Workers and any number of kvstores in one event loop, behind one discovery and a real Redis."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from engine.sampling.params import SamplingParams
from services.kvstore import service as kvstore_service
from services.kvstore.settings import KvStoreSettings
from tests.support.oracle import Oracle
from tests.support.servers import Server, redis_server
from tests.support.stack import Stack, worker_stack

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


class Stores:
    """Workers and kvstores that share one discovery and one Redis."""

    def __init__(self, stack: Stack, redis: Server, settings: dict[str, Any]) -> None:
        self.stack, self.redis, self._settings, self.discovery = stack, redis, settings, settings["discovery"]
        self.took_s = 0.0  # by the last request

    async def start(self, name: str, **settings: Any) -> None:
        """Returns once prefill knows it."""
        await self.stack.start(
            name, KvStoreSettings(instance=name, **{**self._settings, **settings}), kvstore_service.build
        )
        await self.known(name, True)

    async def stop(self, name: str) -> None:
        await self.stack.stop(name)

    async def known(self, name: str, there: bool) -> None:
        stores = self.stack.running["prefill"].servicer.worker._tools.loader._stores
        async with asyncio.timeout(10.0):
            while (stores.named(name) is not None) is not there:  # noqa: ASYNC110 - discovery tells nobody else
                await asyncio.sleep(0.005)

    def held(self, name: str) -> int:
        return len(self.stack.running[name].servicer.store.tier)

    def metric(self, role: str, metric: str, **labels: str) -> float:
        servicer = self.stack.running[role].servicer
        metrics = servicer.core.metrics if role == "prefill" else servicer.store._metrics._metrics
        return metrics.registry.get_sample_value(f"deepinfer_{metric}", labels) or 0.0

    async def asked(self, oracle: Oracle, tokens: list[int]) -> int:
        """Cached tokens of a request at a prefill worker that has nothing of its own; all is stored afterwards."""
        await self.stack.restart("prefill")
        for name in self.stack.running.keys() - {"prefill", "decode"}:
            await self.known(name, True)
        began = time.monotonic()
        answer = await self.stack.ask(tokens, GREEDY)
        self.took_s = time.monotonic() - began
        assert answer.tokens == oracle.answer(tokens, GREEDY) and answer.done is not None
        await self.stack.idle()
        return int(answer.done.usage.cached_tokens)

    async def announced(self) -> None:
        """Returns once Redis was told everything that changed."""
        stores = [self.stack.running[name].servicer.store for name in self.stack.running.keys() - {"prefill", "decode"}]
        async with asyncio.timeout(10.0):
            while any(store._announcer.waiting for store in stores):  # noqa: ASYNC110 - only it knows
                await asyncio.sleep(0.005)


@asynccontextmanager
async def several_stores(
    model: Path, tmp_path: Path, discovery: str = "", transport: str = "inproc://"
) -> AsyncIterator[Stores]:
    """No kvstore yet: `start` them. The decode worker stores nothing."""
    with redis_server(tmp_path) as redis:
        everywhere = {"discovery": discovery or f"memory://{uuid.uuid4().hex}", "transport": transport}
        workers = {**everywhere, "kvstore": True}
        decode = {**workers, "kvstore": False}
        async with worker_stack(model, kvstore=False, prefill=workers, decode=decode) as stack:
            yield Stores(stack, redis, {**everywhere, "index": redis.url, "memory_mb": 64})
