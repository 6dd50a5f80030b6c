"""A kvstore in a process of its own that is killed or frozen: hits are lost, requests are not (promises 16 and 20)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.sampling.params import SamplingParams
from tests.support import procs
from tests.support.oracle import Oracle
from tests.support.promises import Recorder
from tests.support.stack import Stack, worker_stack

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPTS = [[3 + (number + index) % 400 for index in range(300)] for number in range(10)]


@asynccontextmanager
async def remote_store(model: Path, log_dir: Path) -> AsyncIterator[tuple[Stack, procs.Process]]:
    """Workers whose kvstore is a child, with every prompt stored there and with nobody else."""
    options = ("--discovery", "memory://child", "--index", "memory://", "--transport", "tcp://127.0.0.1:0")
    with procs.service("kvstore", log_dir, *options) as (child, ready):
        prefill = {"kvstore": True, "discovery": f"static://kvstore={ready['address']}"}
        async with worker_stack(model, transport="tcp://127.0.0.1:0", kvstore=False, prefill=prefill) as stack:
            for prompt in PROMPTS:
                await stack.ask(prompt, GREEDY)
            await stack.idle()
            await stack.restart("prefill")
            yield stack, child


async def asked(stack: Stack, oracle: Oracle, prompt: list[int]) -> tuple[float, int]:
    """Seconds until the answer, which must be right, and how many of its prompt's tokens were cached."""
    began = time.monotonic()
    answer = await stack.ask(prompt, GREEDY)
    took_s = time.monotonic() - began
    assert answer.tokens == oracle.answer(prompt, GREEDY) and answer.done is not None
    return took_s, answer.done.usage.cached_tokens


@pytest.mark.slow
@pytest.mark.promise(20)
async def test_a_killed_kvstore_costs_hits_and_no_request(
    model: Path, oracle: Oracle, tmp_path: Path, promise: Recorder
) -> None:
    async with remote_store(model, tmp_path) as (stack, child):
        assert (await asked(stack, oracle, PROMPTS[0]))[1] > 0
        child.kill()
        answers = [await asked(stack, oracle, prompt) for prompt in PROMPTS[1:]]
        await stack.idle()
    promise(20, "killed kvstore: requests answered right", len(answers), exactly=len(PROMPTS) - 1)
    promise(20, "killed kvstore: cached tokens", sum(cached for _, cached in answers), exactly=0)
    promise(20, "killed kvstore: slowest request", max(took_s for took_s, _ in answers), at_most=3.0, unit="s")


@pytest.mark.slow
@pytest.mark.promise(16)
async def test_a_frozen_kvstore_delays_requests_for_2_s_at_most(
    model: Path, oracle: Oracle, tmp_path: Path, promise: Recorder
) -> None:
    async with remote_store(model, tmp_path) as (stack, child):
        assert (await asked(stack, oracle, PROMPTS[0]))[1] > 0
        child.freeze()
        frozen, later = time.monotonic(), 0.0
        first_s, _ = await asked(stack, oracle, PROMPTS[1])
        for prompt in PROMPTS[2:]:
            known = time.monotonic() - frozen > 2.0
            took_s, _ = await asked(stack, oracle, prompt)
            later = max(later, took_s) if known else later
        child.thaw()
        await stack.idle()
        stores = stack.running["prefill"].servicer.worker._tools.loader._stores
        async with asyncio.timeout(10.0):  # it answers again, so it is asked again
            while stores._silent:  # noqa: ASYNC110 - the probe announces it to nobody
                await asyncio.sleep(0.01)
        await stack.restart("prefill")
        assert (await asked(stack, oracle, PROMPTS[2]))[1] > 0
    promise(16, "frozen kvstore: the request that meets it takes", first_s, at_most=3.0, unit="s")
    promise(16, "frozen kvstore, after 2 s: slowest request", later, at_most=1.0, unit="s")
