"""The pusher sees the newest mark, learns of lost work, and never waits past its time."""

from __future__ import annotations

import asyncio

from services.prefill.marks import Mark, Marks

LONG_S, SHORT_S = 5.0, 0.01


async def test_a_waiting_pusher_sees_the_newest_mark_only() -> None:
    marks = Marks()
    waiting = asyncio.ensure_future(marks.after(marks.now, LONG_S))
    await asyncio.sleep(0)
    marks.computed(128)
    marks.computed(256)
    assert await waiting == Mark(0, 256)


async def test_a_mark_that_was_missed_is_seen_at_once() -> None:
    marks = Marks()
    marks.computed(128)
    assert await marks.after(Mark(), LONG_S) == Mark(0, 128)


async def test_without_change_there_is_no_mark() -> None:
    marks = Marks()
    assert await marks.after(marks.now, SHORT_S) is None


async def test_lost_work_starts_a_new_generation_from_nothing() -> None:
    marks = Marks()
    marks.computed(256)
    marks.lost()
    assert marks.now == Mark(1, 0)
    marks.computed(256)
    marks.completed()
    assert marks.now == Mark(1, 256, complete=True)
