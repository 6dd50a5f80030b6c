"""A gateway that dies strands nothing: what it had begun is given back by leases and broken calls (promise 19)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from engine.sampling.params import SamplingParams
from fabric import failpoints
from tests.support.frontstack import until
from tests.support.promises import Recorder
from tests.support.wholestack import whole_stack

LEASE_S = 2.0
STREAMS, WAITING = 50, 5
PROMPT = [3 + (11 * index) % 250 for index in range(150)]
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.mark.promise(19)
async def test_kill_9_of_a_gateway_releases_streams_and_reservations(
    model: Path, tmp_path: Path, promise: Recorder
) -> None:
    async with whole_stack(model, decodes=0) as stack:
        await stack.start_decode(lease_s=LEASE_S, max_sequences=64)
        desk = next(servicer.desk for name, servicer in stack.workers.items() if name.startswith("decode"))
        async with stack.gateway_process(tmp_path) as (child, seen):
            with failpoints.armed("decode.token=delay:0.2"):
                asking = [asyncio.create_task(seen.ask([*PROMPT, number], LONG)) for number in range(3, 3 + STREAMS)]
                await until(lambda: failpoints.hits("decode.token") >= 2 * STREAMS, 30.0)
                failpoints.arm("prefill.chunk=delay:30")
                asking += [asyncio.create_task(seen.ask([*PROMPT, number], LONG)) for number in range(60, 60 + WAITING)]
                await until(
                    lambda: failpoints.hits("prefill.chunk") >= WAITING and desk.open == STREAMS + WAITING, 30.0
                )
                child.kill()
                killed = time.monotonic()
                await asyncio.gather(*asking, return_exceptions=True)
                await stack.until_idle(LEASE_S + 10.0)
                what = f"{STREAMS} streams, {WAITING} reservations, lease {LEASE_S:.0f} s: all free after"
                promise(19, what, time.monotonic() - killed, at_most=LEASE_S + 1.0, unit="s")
        short = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        await stack.until_decodes(1)
        assert len((await stack.ask(PROMPT, short)).tokens) == 4


@pytest.mark.slow
@pytest.mark.promise(16)
async def test_a_frozen_gateway_holds_nothing_of_its_workers(model: Path, tmp_path: Path, promise: Recorder) -> None:
    async with whole_stack(model, decodes=1) as stack, stack.gateway_process(tmp_path) as (child, seen):
        with failpoints.armed("decode.token=delay:0.2"):
            asking = [asyncio.create_task(seen.ask([*PROMPT, number], LONG)) for number in range(3, 13)]
            await until(lambda: failpoints.hits("decode.token") >= 20, 30.0)
            await asyncio.to_thread(child.freeze)
            frozen = time.monotonic()
            await stack.until_idle(25.0)
            free_s = time.monotonic() - frozen
            child.kill()
            await asyncio.gather(*asking, return_exceptions=True)
    promise(16, "frozen gateway: its 10 streams at decode are free after", free_s, at_most=3.0, unit="s")
