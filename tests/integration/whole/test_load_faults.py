"""Real worker processes under load: one of two is killed halfway, users barely see it (promises 17 and 18)."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path

import grpc
import pytest

from engine.sampling.params import SamplingParams
from tests.support.oracle import Oracle
from tests.support.promises import Recorder
from tests.support.wholestack import WholeStack, whole_stack

CLIENTS, EACH = 8, 50
PROMPTS = [[3 + (number + 7 * index) % 250 for index in range(60 + number)] for number in range(CLIENTS)]
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class Load:
    """Clients that ask one request after the other; when each ended, and how."""

    def __init__(self, stack: WholeStack, expected: list[list[int]]) -> None:
        self.right, self.ends = 0, list[float]()
        self.halfway = asyncio.Event()
        self._stack, self._expected = stack, expected

    async def client(self, number: int) -> None:
        for _ in range(EACH):
            try:
                answer = await self._stack.ask(PROMPTS[number], SHORT)
                self.right += answer.tokens == self._expected[number]
            except grpc.aio.AioRpcError as error:
                print(f"client {number}: {error.code()}, {error.details()}")
            self.ends.append(time.monotonic())
            if len(self.ends) == CLIENTS * EACH // 2:
                self.halfway.set()


@pytest.mark.slow
@pytest.mark.promise(17, 18)
@pytest.mark.parametrize(("side", "number", "bar"), [("decode", 17, 396), ("prefill", 18, 400)])
async def test_of_400_requests_hardly_one_fails_when_a_worker_process_is_killed(
    model: Path, oracle: Oracle, tmp_path: Path, side: str, number: int, bar: int, promise: Recorder
) -> None:
    expected = [await asyncio.to_thread(oracle.answer, prompt, SHORT) for prompt in PROMPTS]
    async with whole_stack(model, decodes=1, transport="ucx://") as stack:
        async with stack.worker_process(side, tmp_path) as (child, _):
            await stack.until_workers(side, 2)
            load = Load(stack, expected)
            asking = asyncio.gather(*(load.client(each) for each in range(CLIENTS)))
            await load.halfway.wait()
            child.kill()
            await asking
        await stack.until_idle(10.0)
    silence_s = max(later - earlier for earlier, later in pairwise(load.ends[CLIENTS * EACH // 2 - 1 :]))
    promise(number, f"{side} process: of 400 requests, answered right", load.right, at_least=bar)
    promise(number, f"{side} process: longest time without an answer", silence_s, at_most=5.0, unit="s")
