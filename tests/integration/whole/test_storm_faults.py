"""Engines after a storm: blocks, slots, tickets, landings, tasks and files are as they were before (promise 14)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import grpc
import pytest

from engine.sampling.params import SamplingParams
from fabric import failpoints
from tests.support.frontstack import until
from tests.support.promises import Recorder
from tests.support.wholestack import WholeStack, whole_stack

REQUESTS, AT_ONCE = 300, 16
LEFT, HIT = 0.3, 0.1
LEASE_S = 5.0
HURTS = ("decode.token=error@1", "decode.verified=error:data_loss@1", "prefill.chunk=error@1", "prefill.pushed=error@1")


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def held(stack: WholeStack) -> int:
    """Everything that any worker holds for anybody, landing memory included."""
    landings = [
        servicer.desk._landings.stats() for name, servicer in stack.workers.items() if name.startswith("decode")
    ]
    return sum((await stack.held()).values()) + sum(each.granted + each.quarantined + each.retired for each in landings)


async def storm(stack: WholeStack, count: int, random: Random) -> int:
    """Requests of which many are left and some are hit; how many were answered."""
    room, answered = asyncio.Semaphore(AT_ONCE), 0

    async def one(number: int) -> None:
        nonlocal answered
        prompt = [3 + (number + 11 * index) % 250 for index in range(random.randrange(1, 400))]
        sampling = SamplingParams(temperature=0.0, max_tokens=random.randrange(1, 30), ignore_eos=True)
        async with room:
            if random.random() < HIT:
                failpoints.arm(random.choice(HURTS))
            asking = asyncio.create_task(stack.ask(prompt, sampling))
            if random.random() < LEFT:
                await asyncio.wait([asking], timeout=random.expovariate(10.0))
                asking.cancel()
            [result] = await asyncio.gather(asking, return_exceptions=True)
            assert not isinstance(result, Exception) or isinstance(result, grpc.aio.AioRpcError), result
            answered += not isinstance(result, BaseException)

    with failpoints.armed(""):
        await asyncio.gather(*(one(number) for number in range(count)))
    return answered


@pytest.mark.slow
@pytest.mark.promise(14)
async def test_a_storm_leaves_nothing_in_the_engines(model: Path, promise: Recorder) -> None:
    async with whole_stack(model, decodes=2, transport="tcp://127.0.0.1:0", retry_burst=REQUESTS) as stack:
        await storm(stack, 20, Random(1))
        await stack.until_idle(2 * LEASE_S)
        await asyncio.sleep(0.5)  # calls of the warm-up close
        tasks, files = len(asyncio.all_tasks()), open_files()
        answered = await storm(stack, REQUESTS, Random(14))

        async def is_over() -> bool:
            return not await held(stack) and len(asyncio.all_tasks()) == tasks and open_files() <= files

        try:
            await until(is_over, 2 * LEASE_S)
        except TimeoutError:
            print(await stack.held(), sorted(task.get_name() for task in asyncio.all_tasks()))
        what = f"engines, {REQUESTS} requests"
        promise(14, f"{what}: blocks, slots, tickets, landings held", await held(stack), exactly=0)
        promise(14, f"{what}: tasks more than before", len(asyncio.all_tasks()) - tasks, exactly=0)
        promise(14, f"{what}: open files more than before", max(0, open_files() - files), exactly=0)
    assert answered >= 0.6 * REQUESTS
