"""What goes on after its caller left has one owner: it ends, somebody can wait for it, and what waits for it runs."""

from __future__ import annotations

import asyncio

import pytest

from fabric import deadline
from fabric.errors import Unavailable
from fabric.kvlink.leftovers import Leftovers


async def test_what_waits_for_the_rest_of_a_call_runs_once_all_of_it_ended() -> None:
    leftovers, first, second = Leftovers(10.0), asyncio.Event(), asyncio.Event()
    freed: list[str] = []
    leftovers.keep("a", _until(first))
    leftovers.keep("a", _until(second))
    leftovers.after("a", lambda: freed.append("a"))
    leftovers.after("b", lambda: freed.append("b"))  # of which nothing is left
    first.set()
    waiting = asyncio.ensure_future(leftovers.over("a"))
    await asyncio.sleep(0.01)
    assert (freed, leftovers.pending, waiting.done()) == (["b"], 1, False)
    second.set()
    assert await waiting
    assert (freed, leftovers.pending, leftovers.done) == (["b", "a"], 0, 1)


async def test_who_waits_may_leave_and_the_rest_goes_on() -> None:
    leftovers, gate = Leftovers(10.0), asyncio.Event()
    leftovers.keep("a", _until(gate))
    waiting = asyncio.ensure_future(leftovers.over("a"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert leftovers.pending == 1
    gate.set()
    await leftovers.over("a")


@pytest.mark.parametrize("failure", [Unavailable("gone"), KeyError("a defect")])
async def test_work_that_fails_or_never_ends_holds_nothing_for_ever(failure: Exception) -> None:
    leftovers = Leftovers(0.05)
    freed: list[str] = []
    leftovers.keep("fails", _raise(failure))
    leftovers.keep("hangs", _until(asyncio.Event()))
    for owner in ("fails", "hangs"):
        leftovers.after(owner, lambda owner=owner: freed.append(owner))  # type: ignore[misc]
    async with asyncio.timeout(10.0):
        told = [await leftovers.over("fails"), await leftovers.over("hangs"), await leftovers.over("fails")]
    assert freed == ["fails", "hangs"] and not leftovers.pending
    assert told == [False, False, False], "also to who asks when all of it is over"


async def test_the_rest_has_a_deadline_of_its_own() -> None:
    leftovers, seen = Leftovers(10.0), list[float]()

    async def look() -> None:
        seen.append(deadline.remaining_s())

    deadline.enter(0.5)
    leftovers.keep("a", look())
    await leftovers.over("a")
    assert seen == [deadline.DEFAULT_S]


async def test_the_end_of_the_process_cuts_off_what_is_left() -> None:
    leftovers = Leftovers(10.0)
    freed: list[str] = []
    leftovers.keep("a", _until(asyncio.Event()))
    leftovers.after("a", lambda: freed.append("a"))
    await leftovers.aclose()
    assert not await leftovers.over("a")
    assert freed == ["a"]


async def _until(gate: asyncio.Event) -> None:
    await gate.wait()


async def _raise(failure: Exception) -> None:
    raise failure
