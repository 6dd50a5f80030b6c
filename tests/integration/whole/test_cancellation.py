"""A client that leaves the real stack, at whatever line its request stands, leaves nothing behind (promise 13)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.sampling.params import SamplingParams
from fabric import failpoints
from tests.support.engines import runner_of, stats_of
from tests.support.frontstack import until
from tests.support.oracle import Oracle
from tests.support.promises import Recorder
from tests.support.wholestack import WholeStack, whole_stack

PROMPT = [3 + (5 * index) % 250 for index in range(500)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
POINTS = (
    "gateway.chosen", "prefill.queued", "prefill.chunk", "prefill.pushed", "gateway.receipt", "decode.verified",
    "decode.token", "gateway.tokens",
)  # fmt: skip


class Steps:
    """Engine steps that compute something once a worker has told its engine that a request is over."""

    def __init__(self, servicer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self._told, runner = 0, dict[str, int](), runner_of(servicer)
        monkeypatch.setattr(runner, "_observe", self._stepped)
        for name in ("cancel", "release"):
            monkeypatch.setattr(runner, name, partial(self._noting, getattr(runner, name)))

    def after(self) -> int:
        """The most of any request since the last call of this."""
        most = max((self.now - then for then in self._told.values()), default=0)
        self._told.clear()
        return most

    def _stepped(self, step: object) -> None:
        self.now += 1

    def _noting(self, tell: Callable[[str], None], request_id: str) -> None:
        self._told.setdefault(request_id, self.now)
        tell(request_id)


async def leave_at(stack: WholeStack, point: str) -> float:
    """Asks, waits until the request stands at `point`, leaves; seconds until nothing was held any more."""
    with failpoints.armed(f"{point}=delay:30"):
        asking = asyncio.create_task(stack.ask(PROMPT, GREEDY))
        await until(lambda: failpoints.hits(point) > 0, 20.0)
        left = time.monotonic()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await stack.until_idle(10.0)
        return time.monotonic() - left


@pytest.mark.promise(13)
async def test_leaving_at_any_line_frees_every_worker(
    model: Path, monkeypatch: pytest.MonkeyPatch, promise: Recorder
) -> None:
    async with whole_stack(model, decodes=1) as stack:
        engines = [Steps(servicer, monkeypatch) for servicer in stack.workers.values()]
        took, steps = {}, {}
        for point in POINTS:
            took[point] = await leave_at(stack, point)
            await asyncio.sleep(0.1)  # time in which a worker that goes on would take hundreds of steps
            steps[point] = max(engine.after() for engine in engines)
        print(took, steps)
        promise(13, "engines, 8 lines: idle after", max(took.values()), at_most=0.2, unit="s")
        promise(13, "engines, 8 lines: steps after a worker heard of it", max(steps.values()), at_most=1)
        short = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        expected = await asyncio.to_thread(Oracle(model).answer, PROMPT, short)
        assert (await stack.ask(PROMPT, short)).tokens == expected
        await stack.until_idle(10.0)


async def test_leaving_a_stream_at_full_speed_stops_its_decode(model: Path) -> None:
    async with whole_stack(model, decodes=1) as stack:
        async with aclosing(stack.stream(PROMPT, GREEDY)) as replies:
            seen = 0
            while seen < 5:
                seen += len((await anext(replies)).token_ids)
        await stack.until_idle(10.0)
        assert (await stats_of(stack.workers["decode-0"])).output_tokens < GREEDY.max_tokens
