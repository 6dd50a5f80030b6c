"""After a storm of requests, many left and many hit by failures, nothing is held anywhere (promise 14)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from fabric.errors import DataLoss, ServiceError, StaleTicket, Unavailable
from tests.support import bytemodel
from tests.support.fakeprocess import worker_process
from tests.support.frontstack import FrontStack, front_stack, until
from tests.support.promises import Recorder

REQUESTS, AT_ONCE = 2000, 64
LEFT, HIT = 0.3, 0.1
LEASE_S = 10.0
QUIET_S = 3.0  # in which no task ends: what the warm-up began is over
KINDS = (Unavailable, DataLoss, StaleTicket)


def letters(prompt: Sequence[int]) -> list[int]:
    return [*bytemodel.encode("abcdefghijklmnop"), bytemodel.EOS]


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class Storm:
    """Its requests, and what became of them."""

    def __init__(self, stack: FrontStack, seed: int) -> None:
        self.stack, self.random = stack, Random(seed)
        self.answered = self.refused = self.left = self.hit = self.killed = 0
        self._room = asyncio.Semaphore(AT_ONCE)

    def doom(self, request: Any, index: int) -> ServiceError | None:
        """A life ends at one of its tokens as often as makes a tenth of all requests."""
        if self.random.random() >= HIT / len(letters(())):
            return None
        self.hit += 1
        return self.random.choice(KINDS)("its worker died")

    async def run(self, count: int) -> None:
        async with httpx2.AsyncClient(base_url=f"http://{self.stack.http}", timeout=60.0) as client:
            await asyncio.gather(*(self._one(client, number) for number in range(count)))

    async def _one(self, client: httpx2.AsyncClient, number: int) -> None:
        async with self._room:
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=self.body(number)))
            if self.random.random() < LEFT:
                await asyncio.wait([asking], timeout=self.random.expovariate(20.0))
                self.left += asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            elif (await asking).status_code == 200:
                self.answered += 1
            else:
                self.refused += 1

    def body(self, number: int) -> dict[str, Any]:
        return self.stack.body(f"request {number}", stream=bool(number % 2))


@pytest_asyncio.fixture(loop_scope="session")
async def stack(tmp_path: Path) -> AsyncIterator[FrontStack]:
    async with front_stack(tmp_path, prefills=2, decodes=3, retry_burst=2 * REQUESTS) as running:
        running.script.answer, running.script.pause_s = letters, 0.001
        yield running


async def kill_workers(stack: FrontStack, folder: Path, storm: Storm) -> None:
    """One decode process after the other joins the storm and is killed in it, until cancelled."""
    while True:
        async with worker_process(stack, folder / f"child-{storm.killed}.log", pause_s=0.005) as child:
            for served in stack.decodes:
                await served.worker.report(draining=False)
            before = storm.answered
            await until(lambda before=before: storm.answered > before + 50, 60.0)
            child.kill()
            storm.killed += 1


async def settled_tasks() -> int:
    """Tasks, once none has ended for a while: connections of the warm-up close by and by."""
    before = -1
    async with asyncio.timeout(10 * QUIET_S):
        while (tasks := len(asyncio.all_tasks())) != before:
            before = tasks
            await asyncio.sleep(QUIET_S)
    return tasks


@pytest.mark.slow
@pytest.mark.promise(14)
async def test_2000_requests_leave_nothing_behind(stack: FrontStack, tmp_path: Path, promise: Recorder) -> None:
    await Storm(stack, seed=1).run(100)
    await stack.until_idle(5.0)
    tasks, files = await settled_tasks(), open_files()
    storm = Storm(stack, seed=14)
    stack.script.doom = storm.doom
    killing = asyncio.create_task(kill_workers(stack, tmp_path, storm))
    await storm.run(REQUESTS)
    killing.cancel()
    await asyncio.gather(killing, return_exceptions=True)
    over = time.monotonic()
    await stack.until_idle(2 * LEASE_S)
    promise(14, f"{REQUESTS} requests: no call, no ticket is left after", time.monotonic() - over, at_most=20, unit="s")
    print(
        f"answered {storm.answered}, left {storm.left}, hit {storm.hit}, refused {storm.refused}, {storm.killed} killed"
    )
    try:
        await until(lambda: len(asyncio.all_tasks()) == tasks and open_files() <= files, 2 * LEASE_S)
    except TimeoutError:
        print([task.get_name() for task in asyncio.all_tasks()])
    assert storm.left >= 0.2 * REQUESTS and storm.hit >= 0.05 * REQUESTS and storm.killed
    promise(14, f"{REQUESTS} requests: tasks more than before", len(asyncio.all_tasks()) - tasks, exactly=0)
    promise(14, f"{REQUESTS} requests: open files more than before", max(0, open_files() - files), exactly=0)
    promise(14, "of those that stayed, answered", storm.answered / (storm.answered + storm.refused), at_least=0.99)
