"""How often a link looks for notices of those that cannot ring."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fabric.kvlink import ucx_driver
from fabric.kvlink.inbox import Inbox
from fabric.kvlink.link import Notice
from fabric.kvlink.ucx_driver import Driver

PATIENCE_S = 60.0  # so that the thread itself never looks while this runs


class FakeAgent:
    """An agent that nobody reaches, until a test says so."""

    def __init__(self, name: str) -> None:
        self.notices: list[Notice] = []

    def arrived(self) -> list[Notice]:
        return self.notices

    def close(self) -> None: ...


@pytest.fixture
async def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ucx_driver, "Agent", FakeAgent)
    running = Driver("d", asyncio.get_running_loop(), Inbox(), PATIENCE_S)
    yield running
    running.close()


async def test_a_link_whose_neighbours_ring_looks_rarely_for_others_until_it_heard_of_one(driver: Driver) -> None:
    driver._expecting = 1
    assert driver._sleep_s() == 5 * PATIENCE_S
    agent: Any = FakeAgent("d")
    driver._take_notices(agent)
    assert driver._sleep_s() == 5 * PATIENCE_S, "nobody was there"
    agent.notices = [Notice("p", 1, b"x")]
    driver._take_notices(agent)
    assert driver._sleep_s() == PATIENCE_S
