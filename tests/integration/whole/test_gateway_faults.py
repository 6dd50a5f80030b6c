"""A gateway that dies strands nothing: what it had begun is given back by leases and broken calls (promise 19)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from engine.sampling.params import SamplingParams
from fabric import failpoints
from tests.support.frontstack import until
from tests.support.wholestack import whole_stack, write_model

LEASE_S = 2.0
STREAMS, WAITING = 10, 5
PROMPT = [3 + (11 * index) % 250 for index in range(150)]
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bytes") / "tiny")


async def test_kill_9_of_a_gateway_releases_streams_and_reservations(model: Path, tmp_path: Path) -> None:
    async with whole_stack(model, decodes=0) as stack:
        await stack.start_decode(lease_s=LEASE_S)
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
                await stack.until_idle(LEASE_S + 1.0)
                print(f"all given back {time.monotonic() - killed:.2f} s after the kill, lease {LEASE_S} s")
        short = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        await stack.until_decodes(1)
        assert len((await stack.ask(PROMPT, short)).tokens) == 4
