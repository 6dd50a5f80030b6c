"""Memory that waits for bytes of a store goes back with its attempt, whatever the engine is doing."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from engine.runner import EngineRunner
from engine.sampling.params import SamplingParams
from services.prefill.ask import PrefillAsk
from services.prefill.load import Loader
from tests.support.fakefamily import fake_engine

ASK = PrefillAsk("r", tuple(range(2, 40)), SamplingParams(), b"", use_cache=True)


class Waiting(Loader):
    """Of a store that never writes."""

    def __init__(self, engine: EngineRunner) -> None:
        nothing: Any = SimpleNamespace()
        super().__init__(engine, nothing, nothing, 0, str, 60.0, nothing, nothing)
        self.landing = asyncio.Event()

    async def _land(self, *args: Any) -> None:
        self.landing.set()
        await asyncio.Event().wait()


async def test_a_load_that_is_given_up_waits_for_no_engine_and_leaves_nothing() -> None:
    """An engine that is busy for longer than a call may take used to keep the caller, and then the memory."""
    runner, go_on = EngineRunner(fake_engine()), threading.Event()
    loader = Waiting(runner)
    try:
        loading = asyncio.create_task(loader._fetch(SimpleNamespace(), ASK, [], 0, 2))  # type: ignore[arg-type]
        await asyncio.wait_for(loader.landing.wait(), 10.0)
        assert (await runner.call(runner.engine.stats)).loading == 1
        busy = asyncio.ensure_future(runner.call(go_on.wait, 30.0, timeout_s=30.0))
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(loading, 5.0)
        assert not busy.done()
        go_on.set()
        await busy
        stats = await runner.call(runner.engine.stats)
        assert stats.loading == stats.blocks_held == stats.slots_held == 0
    finally:
        go_on.set()
        await runner.close()
