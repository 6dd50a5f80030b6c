"""A deadline is inherited, only ever shortened, and shrinks on the way out."""

from __future__ import annotations

import asyncio

import pytest

from fabric import deadline
from fabric.errors import DeadlineExceeded


class Context:
    def __init__(self, left_s: float | None) -> None:
        self._left_s = left_s

    def time_remaining(self) -> float | None:
        return self._left_s


@pytest.mark.parametrize(("wish", "allowed"), [(None, 120.0), (5.0, 5.0), (1e12, 3600.0)])
def test_default_and_cap(wish, allowed):
    assert deadline.allowed_s(wish) == allowed


async def test_a_task_inherits_and_cannot_extend():
    async def child() -> float:
        deadline.enter(50.0)
        return deadline.remaining_s()

    deadline.enter(5.0)
    assert await asyncio.create_task(child()) <= 5.0
    assert 4.0 < deadline.remaining_s() <= 5.0


async def test_an_outgoing_call_gets_less_than_what_is_left():
    deadline.enter(5.0)
    assert 4.5 < deadline.shrunk_s() < 5.0 - 0.04
    assert deadline.shrunk_s(1.0) == 1.0


async def test_no_call_is_made_after_the_end():
    deadline.enter(0.0)
    assert deadline.remaining_s() == 0.0
    with pytest.raises(DeadlineExceeded):
        deadline.shrunk_s()


async def test_the_servicer_context_counts_as_well():
    assert deadline.remaining_s(Context(2.0)) == 2.0
    assert deadline.remaining_s(Context(None)) == 120.0
