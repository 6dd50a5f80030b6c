"""Following a worker: silence is asked about, loss is believed at once, recovery is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from fabric.errors import DeadlineExceeded, ServiceError, Unavailable
from protos.deepinfer.v1 import common_pb2
from services.gateway.follower import Follower, Patience
from services.gateway.mirror import Doubt, Knowledge
from services.gateway.standing import Limits, Standing
from tests.support.frontstack import until


class FakeSide:
    """A worker that says what the test tells it to."""

    def __init__(self) -> None:
        self.epoch = 1
        self.asked = self.watched = 0
        self.failure: ServiceError | None = None
        self.statuses: asyncio.Queue[common_pb2.WorkerStatus | ServiceError] = asyncio.Queue()

    async def limits(self, timeout_s: float) -> Limits:
        self.asked += 1
        if self.failure is not None:
            raise self.failure
        return Limits(common_pb2.ModelInfo(name="m"), self.epoch, 100, 4)

    async def watch(self) -> AsyncGenerator[common_pb2.WorkerStatus, None]:
        self.watched += 1
        while True:
            status = await self.statuses.get()
            if isinstance(status, ServiceError):
                raise status
            yield status


class Followed:
    """A follower at work on a clock that the test moves."""

    def __init__(self) -> None:
        self.side, self.now = FakeSide(), 0.0
        self.published: list[Standing] = []
        self.doubts: list[Doubt] = []
        patience = Patience(0.01, 6.0)
        follower = Follower("w", self.side, self.published.append, lambda: self.now, patience, self.doubts.append)
        self.task = asyncio.create_task(follower.run())

    @property
    def usable(self) -> bool:
        return bool(self.published) and self.published[-1].usable(6.0)


@pytest.fixture
async def followed() -> AsyncIterator[Followed]:
    running = Followed()
    await until(lambda: running.usable, 20.0)
    yield running
    running.task.cancel()
    await asyncio.gather(running.task, return_exceptions=True)


async def test_a_worker_that_has_nothing_to_report_is_asked_and_stays(followed: Followed) -> None:
    asked = followed.side.asked
    followed.now = 5.0
    await until(lambda: followed.side.asked > asked, 20.0)
    followed.now = 10.0
    assert followed.usable


async def test_a_busy_worker_that_answers_late_stays_until_it_is_silent_too_long(followed: Followed) -> None:
    followed.side.failure = DeadlineExceeded("busy")
    asked = followed.side.asked
    followed.now = 4.0
    await until(lambda: followed.side.asked > asked, 20.0)
    assert followed.usable
    followed.now = 6.5
    assert not followed.usable
    followed.side.failure = None
    await until(lambda: followed.usable, 20.0)


@pytest.mark.parametrize("by", ["watch", "probe"])
async def test_a_lost_connection_ends_its_use_at_once_and_recovery_restores_it(followed: Followed, by: str) -> None:
    if by == "watch":
        followed.side.failure = Unavailable("gone")
        followed.side.statuses.put_nowait(Unavailable("gone"))
    else:
        followed.side.failure = Unavailable("gone")
        followed.now = 1.0
    await until(lambda: not followed.usable, 20.0)
    followed.side.failure = None
    await until(lambda: followed.usable, 20.0)


async def test_a_worker_that_restarted_in_place_is_a_new_one(followed: Followed) -> None:
    followed.side.epoch = 2
    followed.side.statuses.put_nowait(Unavailable("restarting"))
    await until(lambda: len(followed.published) == 2, 20.0)
    assert followed.published[-1].limits.epoch == 2


async def test_a_stream_that_left_something_out_is_followed_anew(followed: Followed) -> None:
    watched, statuses = followed.side.watched, followed.side.statuses
    statuses.put_nowait(common_pb2.WorkerStatus(epoch=1, keys_reset=True, keys_version=3))
    statuses.put_nowait(common_pb2.WorkerStatus(epoch=1, keys_base=4, keys_version=5))
    await until(lambda: bool(followed.doubts), 20.0)
    followed.now += 2.0
    statuses.put_nowait(common_pb2.WorkerStatus(epoch=1, keys_base=5, keys_version=5))
    await until(lambda: followed.side.watched > watched, 20.0)
    assert followed.usable
    statuses.put_nowait(common_pb2.WorkerStatus(epoch=1, keys_reset=True, keys_version=5))
    await until(lambda: followed.published[-1].view(6.0).knowledge is Knowledge.EXACT, 20.0)
    assert followed.doubts == [Doubt.GAP] and len(followed.published) == 1


async def test_reports_are_taken_as_they_come(followed: Followed) -> None:
    followed.side.statuses.put_nowait(common_pb2.WorkerStatus(sequence=1, queued_tokens=77))
    await until(lambda: followed.published[-1].view().queued_tokens == 77, 20.0)
