"""Every KV index, fake or real, keeps the same promises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from services.kvstore.hints import Hints
from services.kvstore.index import Index, IndexLost, open_index
from tests.support.clock import FakeClock
from tests.support.servers import redis_server

KEYS = [bytes([number]) * 32 for number in range(4)]
TTL_S = 0.4
Wait = Callable[[float], None]


@pytest.fixture(params=["memory", "redis"])
async def index(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Index, FakeClock]]:
    clock = FakeClock()
    if request.param == "memory":
        opened = open_index("memory://", TTL_S, clock)
        yield opened, clock
        await opened.close()
        return
    with redis_server(tmp_path) as redis:
        opened = open_index(redis.url, TTL_S, clock)
        yield opened, clock
        await opened.close()


async def test_published_keys_name_their_holder(index: tuple[Index, FakeClock]) -> None:
    await index[0].publish(KEYS[:2], "a")
    await index[0].publish(KEYS[2:3], "b")
    assert await index[0].holders(KEYS) == ["a", "a", "b", ""]


async def test_only_the_holder_can_withdraw(index: tuple[Index, FakeClock]) -> None:
    await index[0].publish(KEYS[:2], "a")
    await index[0].withdraw(KEYS[:1], "a")
    await index[0].withdraw(KEYS[1:2], "b")
    assert await index[0].holders(KEYS[:2]) == ["", "a"]


async def test_every_key_expires(index: tuple[Index, FakeClock]) -> None:
    opened, clock = index
    await opened.publish(KEYS, "a")
    for _ in range(100):  # the fake's clock is moved; the real one moves while we ask
        clock.advance(TTL_S / 50)
        if await opened.holders(KEYS) == [""] * 4:
            return
        await _pass_time()
    raise AssertionError("a key outlived its time")


async def test_nothing_asked_is_nothing_answered(index: tuple[Index, FakeClock]) -> None:
    await index[0].publish([], "a")
    await index[0].withdraw([], "a")
    assert await index[0].holders([]) == []


async def _pass_time() -> None:
    import asyncio

    await asyncio.sleep(TTL_S / 50)


class Broken:
    """An index that never answers, and counts how often it was asked."""

    asked = 0

    async def publish(self, keys: object, instance: str) -> None:
        raise IndexLost

    async def withdraw(self, keys: object, instance: str) -> None:
        raise IndexLost

    async def holders(self, keys: object) -> list[str]:
        self.asked += 1
        raise IndexLost

    async def close(self) -> None:
        """Nothing is open."""


async def test_a_lost_index_is_asked_again_only_after_a_rest() -> None:
    broken, clock = Broken(), FakeClock()
    hints = Hints(broken, "me", clock)
    assert await hints.elsewhere(KEYS) == ("", 0)
    assert await hints.elsewhere(KEYS) == ("", 0)
    assert (broken.asked, hints.lost) == (1, 1)
    clock.advance(60.0)
    await hints.elsewhere(KEYS)
    assert broken.asked == 2


async def test_hints_name_another_instance_for_leading_blocks_alone() -> None:
    clock = FakeClock()
    index = open_index("memory://", 60.0, clock)
    hints = Hints(index, "me", clock)
    await index.publish(KEYS[:2], "other")
    await index.publish(KEYS[2:3], "third")
    assert await hints.elsewhere(KEYS) == ("other", 2)
    await index.publish(KEYS[:1], "me")
    assert await hints.elsewhere(KEYS) == ("", 0)


async def test_a_redis_that_is_not_there_is_lost_not_an_error(tmp_path: Path) -> None:
    with redis_server(tmp_path) as redis:
        index = open_index(redis.url, 60.0, FakeClock())
    with pytest.raises(IndexLost):
        await index.holders(KEYS)
    await index.close()
