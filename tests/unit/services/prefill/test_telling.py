"""Progress keeps its order and never holds up the work; what the last message overtakes is left out."""

from __future__ import annotations

import asyncio

import pytest

from fabric.errors import Unavailable
from services.prefill.telling import Telling


class Caller:
    """Takes messages while its gate is open; fails once told to."""

    def __init__(self) -> None:
        self.heard: list[int | str | float] = []
        self.gate, self.asked = asyncio.Event(), asyncio.Event()
        self.failure: Unavailable | None = None
        self.all_heard = asyncio.Event()

    async def hear(self, message: int | str | float) -> None:
        self.asked.set()
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.heard.append(message)
        if len(self.heard) == 3:
            self.all_heard.set()


async def test_of_what_waits_for_a_slow_caller_only_the_newest_of_each_kind_is_sent() -> None:
    caller = Caller()
    telling: Telling[int | str | float] = Telling(caller.hear)
    telling.tell("first")
    await caller.asked.wait()
    for message in (1, 0.5, 2, 3):
        telling.tell(message)
    caller.gate.set()
    await asyncio.wait_for(caller.all_heard.wait(), 20.0)
    assert caller.heard == ["first", 3, 0.5]
    await telling.close()


async def test_the_last_message_overtakes_what_waits_but_not_what_is_on_its_way() -> None:
    caller = Caller()
    telling: Telling[int | str | float] = Telling(caller.hear)
    telling.tell(1)
    await caller.asked.wait()
    telling.tell("overtaken")
    finishing = asyncio.ensure_future(telling.finish(0.5))
    await asyncio.sleep(0)
    caller.gate.set()
    await finishing
    assert caller.heard == [1, 0.5]


async def test_a_caller_that_cannot_be_reached_ends_the_work_at_the_next_message() -> None:
    caller = Caller()
    caller.gate.set()
    caller.failure = Unavailable("gone")
    telling: Telling[int | str | float] = Telling(caller.hear)
    telling.tell(1)
    await caller.asked.wait()
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        telling.tell(2)
    await telling.close()
