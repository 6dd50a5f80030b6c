"""Every KV index, fake or real, keeps the same promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.kvstore.hints import Hints
from services.kvstore.index import Index, IndexLost, Lead, Tier, open_index
from tests.support.clock import FakeClock
from tests.support.servers import redis_server

KEYS = [bytes([number]) * 32 for number in range(4)]
TTL_S = 60.0  # longer than any test: what is asked for must not have expired
BRIEF_S = 0.4


@pytest.fixture(params=["memory", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "memory":
        yield "memory://"
        return
    with redis_server(tmp_path) as redis:
        yield redis.url


@pytest.fixture
async def index(url: str, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Index, FakeClock]]:
    clock = FakeClock()
    opened = open_index(url, getattr(request, "param", TTL_S), clock)
    yield opened, clock
    await opened.close()


async def test_published_keys_name_their_holders_and_tiers(index: tuple[Index, FakeClock]) -> None:
    opened = await marked(index[0], "a", "b")
    await opened.publish({KEYS[0]: Tier.DRAM, KEYS[1]: Tier.NVME}, "a", "run")
    await opened.publish({KEYS[1]: Tier.DRAM}, "b", "run")
    assert await opened.holders(KEYS) == [Lead("a", blocks=2, in_memory=1)]
    assert {lead.instance: lead for lead in await opened.holders(KEYS[1:])} == {
        "a": Lead("a", blocks=1, in_memory=0),
        "b": Lead("b", blocks=1, in_memory=1),
    }


async def test_a_key_in_another_tier_is_published_anew(index: tuple[Index, FakeClock]) -> None:
    opened = await marked(index[0], "a")
    await opened.publish({KEYS[0]: Tier.DRAM}, "a", "run")
    await opened.publish({KEYS[0]: Tier.NVME}, "a", "run")
    assert await opened.holders(KEYS[:1]) == [Lead("a", 1, 0)]


async def test_a_lead_ends_at_the_first_key_that_is_not_held(index: tuple[Index, FakeClock]) -> None:
    opened = await marked(index[0], "a", "b")
    await opened.publish({KEYS[0]: Tier.DRAM, KEYS[2]: Tier.DRAM}, "a", "run")
    await opened.publish(dict.fromkeys(KEYS[1:], Tier.DRAM), "b", "run")
    assert await opened.holders(KEYS) == [Lead("a", 1, 1)]


async def test_a_holder_withdraws_itself_alone(index: tuple[Index, FakeClock]) -> None:
    opened = await marked(index[0], "a", "b")
    await opened.publish(dict.fromkeys(KEYS[:2], Tier.DRAM), "a", "run")
    await opened.publish(dict.fromkeys(KEYS[:1], Tier.DRAM), "b", "run")
    await opened.withdraw(KEYS[:2], "a")
    assert await opened.holders(KEYS[:2]) == [Lead("b", 1, 1)]


async def test_a_holder_without_a_mark_is_not_told_of(index: tuple[Index, FakeClock]) -> None:
    opened = index[0]
    await opened.publish({KEYS[0]: Tier.DRAM}, "dead", "run")
    assert await opened.holders(KEYS[:1]) == []
    await (await marked(opened, "a")).publish({KEYS[0]: Tier.DRAM}, "a", "run")
    assert await opened.holders(KEYS[:1]) == [Lead("a", 1, 1)]


async def test_what_a_former_run_told_does_not_count(index: tuple[Index, FakeClock]) -> None:
    opened = await marked(index[0], "a")
    await opened.publish(dict.fromkeys(KEYS[:2], Tier.DRAM), "a", "run")
    await opened.mark("a", "next", 60.0)
    assert await opened.holders(KEYS[:1]) == []
    await opened.publish({KEYS[0]: Tier.NVME}, "a", "next")
    assert await opened.holders(KEYS) == [Lead("a", 1, 0)]


async def test_who_leaves_takes_its_own_mark_alone(index: tuple[Index, FakeClock]) -> None:
    opened = await marked(index[0], "a")
    await opened.publish({KEYS[0]: Tier.DRAM}, "a", "run")
    await opened.unmark("a", "former")
    assert await opened.mark("a", "run", 60.0)
    await opened.unmark("a", "run")
    assert await opened.holders(KEYS[:1]) == []


async def test_a_mark_tells_whether_the_last_one_of_the_same_run_stands(index: tuple[Index, FakeClock]) -> None:
    opened = index[0]
    assert not await opened.mark("a", "1", 60.0)
    assert await opened.mark("a", "1", 60.0)
    assert not await opened.mark("a", "2", 60.0)


@pytest.mark.parametrize("index", [BRIEF_S], indirect=True)
async def test_every_key_expires(index: tuple[Index, FakeClock]) -> None:
    clock, opened = index[1], await marked(index[0], "a")
    await opened.publish(dict.fromkeys(KEYS, Tier.DRAM), "a", "run")
    for _ in range(100):  # the fake's clock is moved; the real one moves while we ask
        clock.advance(BRIEF_S / 50)
        if not await opened.holders(KEYS):
            return
        await _pass_time()
    raise AssertionError("a key outlived its time")


async def test_nothing_asked_is_nothing_answered(index: tuple[Index, FakeClock]) -> None:
    await index[0].publish({}, "a", "run")
    await index[0].withdraw([], "a")
    assert await index[0].holders([]) == []


async def marked(index: Index, *instances: str) -> Index:
    for instance in instances:
        await index.mark(instance, "run", 60.0)
    return index


async def _pass_time() -> None:
    await asyncio.sleep(BRIEF_S / 50)


class Broken:
    """An index that never answers, and counts how often it was asked."""

    asked = 0

    async def mark(self, instance: str, run: str, ttl_s: float) -> bool:
        raise IndexLost

    async def unmark(self, instance: str, run: str) -> None:
        raise IndexLost

    async def publish(self, held: object, instance: str, run: str) -> None:
        raise IndexLost

    async def withdraw(self, keys: object, instance: str) -> None:
        raise IndexLost

    async def holders(self, keys: object) -> list[Lead]:
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


async def test_hints_name_the_other_instance_that_holds_most_leading_blocks() -> None:
    clock = FakeClock()
    index = await marked(open_index("memory://", 60.0, clock), "me", "other", "third")
    hints = Hints(index, "me", clock)
    await index.publish(dict.fromkeys(KEYS[:2], Tier.NVME), "other", "run")
    await index.publish(dict.fromkeys((KEYS[0], KEYS[2]), Tier.DRAM), "third", "run")
    assert await hints.elsewhere(KEYS) == ("other", 2)
    await index.publish(dict.fromkeys(KEYS[:2], Tier.DRAM), "third", "run")
    assert await hints.elsewhere(KEYS) == ("third", 3)
    await index.publish({KEYS[3]: Tier.DRAM}, "me", "run")
    assert await hints.elsewhere(KEYS[3:]) == ("", 0)


async def test_of_equal_holders_the_one_with_more_in_memory_is_named() -> None:
    clock = FakeClock()
    index = await marked(open_index("memory://", 60.0, clock), "disk", "memory")
    await index.publish(dict.fromkeys(KEYS, Tier.NVME), "disk", "run")
    await index.publish(dict.fromkeys(KEYS, Tier.DRAM), "memory", "run")
    assert await Hints(index, "me", clock).elsewhere(KEYS) == ("memory", 4)


async def test_a_redis_that_is_not_there_is_lost_not_an_error(tmp_path: Path) -> None:
    with redis_server(tmp_path) as redis:
        index = open_index(redis.url, 60.0, FakeClock())
    with pytest.raises(IndexLost):
        await index.holders(KEYS)
    await index.close()
