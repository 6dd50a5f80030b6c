"""Coroutines that live together end together, and what must not be cut off is not."""

from __future__ import annotations

import asyncio

import pytest

from services.worker.together import settled, together


async def value(number: int) -> int:
    return number


async def test_both_results_come_back_in_order() -> None:
    assert await together(value(1), value(2)) == (1, 2)


@pytest.mark.parametrize("failing_first", [True, False])
async def test_the_first_failure_ends_the_other_before_it_is_raised(failing_first: bool) -> None:
    ended: list[str] = []
    waits = asyncio.Event()

    async def waiting() -> None:
        try:
            waits.set()
            await asyncio.Event().wait()
        finally:
            ended.append("waiting")

    async def failing() -> None:
        await waits.wait()
        raise KeyError("reason")

    pair = (failing(), waiting()) if failing_first else (waiting(), failing())
    with pytest.raises(KeyError, match="reason"):
        await together(*pair)
    assert ended == ["waiting"]


async def test_cancelling_the_pair_ends_both() -> None:
    ended: list[int] = []
    begun = asyncio.Semaphore(0)

    async def waiting(number: int) -> None:
        try:
            begun.release()
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    pair = asyncio.ensure_future(together(waiting(1), waiting(2)))
    await begun.acquire()
    await begun.acquire()
    pair.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pair
    assert sorted(ended) == [1, 2]


async def test_settled_work_ends_before_its_cancelled_caller() -> None:
    order: list[str] = []
    go, running = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        running.set()
        await go.wait()
        order.append("work")

    async def caller() -> None:
        try:
            await settled(work())
        finally:
            order.append("caller")

    task = asyncio.ensure_future(caller())
    await running.wait()
    task.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert order == ["work", "caller"]
