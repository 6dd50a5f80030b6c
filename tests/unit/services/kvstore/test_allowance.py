"""What reads keep in place is bounded, first come first served, and nothing that was given up stays taken."""

from __future__ import annotations

import asyncio

import pytest

from fabric.errors import Exhausted
from services.kvstore import allowance as module
from services.kvstore.allowance import Allowance

LONG_S = 30.0


async def waiting(allowance: Allowance, *sizes: int) -> list[asyncio.Task[int]]:
    """Tasks that wait for their turns, in this order."""
    tasks = [asyncio.ensure_future(allowance.take(size, LONG_S)) for size in sizes]
    await asyncio.sleep(0)
    return tasks


async def test_turns_come_in_order_as_soon_as_they_fit() -> None:
    allowance = Allowance(10)
    assert await allowance.take(8, LONG_S) == 8
    large, small = await waiting(allowance, 6, 2)
    assert not large.done() and not small.done()  # two would fit, but come later
    allowance.give(8)
    assert await asyncio.wait_for(asyncio.gather(large, small), LONG_S) == [6, 2] and allowance.taken == 8


async def test_more_than_there_ever_is_goes_alone() -> None:
    allowance = Allowance(10)
    assert await allowance.take(1, LONG_S) == 1
    (whole,) = await waiting(allowance, 25)
    assert not whole.done()
    allowance.give(1)
    assert await asyncio.wait_for(whole, LONG_S) == 10
    allowance.give(10)
    assert allowance.taken == 0


async def test_a_wait_that_is_over_keeps_nothing_and_holds_up_nobody() -> None:
    allowance = Allowance(10)
    await allowance.take(8, LONG_S)
    with pytest.raises(TimeoutError):
        await allowance.take(6, 0.001)
    assert await allowance.take(2, LONG_S) == 2 and allowance.taken == 10


async def test_who_is_cancelled_as_its_turn_comes_gives_it_back() -> None:
    allowance = Allowance(10)
    await allowance.take(10, LONG_S)
    given_up, next_ = await waiting(allowance, 10, 10)
    allowance.give(10)
    given_up.cancel()
    assert await asyncio.wait_for(next_, LONG_S) == 10 and given_up.cancelled() and allowance.taken == 10


async def test_who_is_cancelled_before_its_turn_lets_the_next_one_pass() -> None:
    allowance = Allowance(10)
    await allowance.take(5, LONG_S)
    given_up, next_ = await waiting(allowance, 10, 5)
    given_up.cancel()
    assert await asyncio.wait_for(next_, LONG_S) == 5 and allowance.taken == 10


async def test_more_than_may_wait_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    allowance = Allowance(10)
    await allowance.take(10, LONG_S)
    tasks = await waiting(allowance, 1, 1)
    with pytest.raises(Exhausted):
        await allowance.take(1, LONG_S)
    allowance.give(10)
    assert await asyncio.wait_for(asyncio.gather(*tasks), LONG_S) == [1, 1]
