"""A client that leaves the real stack, at whatever line its request stands, leaves nothing behind (promise 13)."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from engine.sampling.params import SamplingParams
from fabric import failpoints
from tests.support.frontstack import until
from tests.support.oracle import Oracle
from tests.support.wholestack import WholeStack, whole_stack, write_model

PROMPT = [3 + (5 * index) % 250 for index in range(500)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
POINTS = (
    "gateway.chosen", "prefill.queued", "prefill.chunk", "prefill.pushed", "gateway.receipt", "decode.verified",
    "decode.token", "gateway.tokens",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bytes") / "tiny")


def steps(stack: WholeStack) -> int:
    """Engine steps of all workers so far."""
    return sum(servicer.core.engine.engine.stats().steps for servicer in stack.workers.values())


async def leave_at(stack: WholeStack, point: str) -> float:
    """Asks, waits until the request stands at `point`, leaves; seconds until nothing was held any more."""
    with failpoints.armed(f"{point}=delay:30"):
        asking = asyncio.create_task(stack.ask(PROMPT, GREEDY))
        await until(lambda: failpoints.hits(point) > 0, 20.0)
        left = time.monotonic()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await stack.until_idle(2.0)
        return time.monotonic() - left


async def test_leaving_at_any_line_frees_every_worker(model: Path) -> None:
    async with whole_stack(model, decodes=1) as stack:
        took = {}
        for point in POINTS:
            took[point] = await leave_at(stack, point)
            before = steps(stack)
            await asyncio.sleep(0.1)  # time in which a worker that goes on would take hundreds of steps
            assert steps(stack) - before <= 1, point
        print({point: f"{seconds * 1000:.0f} ms" for point, seconds in took.items()})
        assert max(took.values()) <= 0.5  # 200 ms are promised where nothing else runs
        short = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        expected = await asyncio.to_thread(Oracle(model).answer, PROMPT, short)
        assert (await stack.ask(PROMPT, short)).tokens == expected
        await stack.until_idle(2.0)


async def test_leaving_a_stream_at_full_speed_stops_its_decode(model: Path) -> None:
    async with whole_stack(model, decodes=1) as stack:
        async with aclosing(stack.stream(PROMPT, GREEDY)) as replies:
            seen = 0
            while seen < 5:
                seen += len((await anext(replies)).token_ids)
        await stack.until_idle(2.0)
        assert stack.workers["decode-0"].core.engine.engine.stats().output_tokens < GREEDY.max_tokens
