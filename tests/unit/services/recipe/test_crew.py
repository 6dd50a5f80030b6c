"""The crew: bounded, and bounded in time."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fabric.errors import DeadlineExceeded, Exhausted
from services.recipe.crew import Crew
from tests.support.frontstack import until


async def test_a_job_that_overruns_its_deadline_fails_and_keeps_its_place() -> None:
    crew, release = Crew(1, 0), threading.Event()
    try:
        with pytest.raises(DeadlineExceeded):
            await crew.run(release.wait, 0.01)
        assert crew.pending == 1
        with pytest.raises(Exhausted) as caught:
            await crew.run(lambda: None, 1.0)
        assert caught.value.retry_after_s
    finally:
        release.set()
        crew.close()


async def test_a_place_is_free_again_after_every_end() -> None:
    crew = Crew(1, 1)

    def fail() -> None:
        raise ValueError

    assert await crew.run(lambda: 7, 1.0) == 7
    with pytest.raises(ValueError):
        await crew.run(fail, 1.0)
    release = threading.Event()
    waiting = asyncio.create_task(crew.run(release.wait, 5.0))
    await asyncio.sleep(0)
    waiting.cancel()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: not crew.pending, 20.0)
    assert crew.done == 3
    crew.close()
