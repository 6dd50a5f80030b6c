"""A real Redis that is flushed, killed or started anew: it is told everything again, and nobody waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from fabric.lifecycle import background
from services.kvstore.announcer import Announcer, Pace
from services.kvstore.hints import Hints
from services.kvstore.index import Tier
from services.kvstore.index_redis import RedisIndex
from tests.support.servers import Server, redis_server

KEYS = [number.to_bytes(32, "little") for number in range(3000)]
FAST = Pace(ttl_s=60.0, keys_per_s=100_000.0, mark_s=0.2, rest_s=0.05)


class Holder:
    """An instance that holds KEYS and announces them, and a neighbour that asks."""

    def __init__(self, redis: Server) -> None:
        self.index = RedisIndex(redis.url, FAST.ttl_s)
        self.holds = dict.fromkeys(KEYS, Tier.DRAM)
        self.announcer = Announcer(self.index, "holder", "run", FAST, time.monotonic)
        self.announcer.where, self.announcer.held = self.holds.get, lambda: self.holds

    async def known(self) -> int:
        """Leading keys that a neighbour is pointed to now."""
        hints = Hints(self.index, "neighbour", time.monotonic)
        return (await hints.elsewhere(KEYS))[1] + (await hints.elsewhere(KEYS[::-1]))[1]

    async def until_known(self, keys: int) -> None:
        async with asyncio.timeout(20.0):
            while await self.known() != keys:  # noqa: ASYNC110 - only Redis can tell
                await asyncio.sleep(0.02)


@asynccontextmanager
async def holder(redis: Server) -> AsyncIterator[Holder]:
    async with AsyncExitStack() as stack:
        held = Holder(redis)
        stack.push_async_callback(held.index.close)
        await stack.enter_async_context(background(held.announcer.run(), "announcer"))
        await held.until_known(2048)
        yield held


async def test_a_flushed_redis_is_told_everything_again(tmp_path: Path) -> None:
    with redis_server(tmp_path) as redis:
        async with holder(redis) as held, Redis.from_url(redis.url) as client:
            await client.flushall()
            await held.until_known(2048)
            assert held.announcer.counts.reannounced >= 2 * len(KEYS)


async def test_a_redis_that_is_killed_and_starts_empty_is_told_what_is_held_by_then(tmp_path: Path) -> None:
    with redis_server(tmp_path) as redis:
        async with holder(redis) as held:
            redis.kill()
            asked = time.monotonic()
            assert await held.known() == 0
            assert time.monotonic() - asked < 10.0
            for key in KEYS[1000:]:
                del held.holds[key]
            held.announcer.changed(KEYS[1000:])
            await asyncio.to_thread(redis.start, keep_data=False)
            await held.until_known(1000)
            assert held.announcer.counts.lost >= 1


async def test_who_does_not_mark_itself_is_forgotten_and_comes_back_with_its_mark(tmp_path: Path) -> None:
    with redis_server(tmp_path) as redis:
        async with holder(redis) as held, Redis.from_url(redis.url) as client:
            await client.hset(b"deepinfer:kv:held:" + KEYS[0], "gone", "dram run")
            assert (await Hints(held.index, "neighbour", time.monotonic).elsewhere(KEYS))[0] == "holder"
            assert await client.hkeys(b"deepinfer:kv:held:" + KEYS[0]) == [b"holder"]
            await client.delete("deepinfer:kv:mark:holder")
            await held.until_known(2048)


async def test_every_key_in_redis_has_a_time_to_live(tmp_path: Path) -> None:
    with redis_server(tmp_path) as redis:
        async with holder(redis), Redis.from_url(redis.url) as client:
            keys = await client.keys()
            assert len(keys) == len(KEYS) + 1  # and the mark
            assert min([await client.pttl(key) for key in keys]) > 0


@pytest.mark.parametrize("value", [b"", b"x" * 100, b"dram", b"dram\x00 run", b"dram other", b"\xff run"])
async def test_what_is_no_holding_is_not_believed(tmp_path: Path, value: bytes) -> None:
    with redis_server(tmp_path) as redis:
        async with holder(redis) as held, Redis.from_url(redis.url) as client:
            await client.hset(b"deepinfer:kv:held:" + KEYS[0], "forger", value)
            await client.set("deepinfer:kv:mark:forger", "run")
            assert (await Hints(held.index, "neighbour", time.monotonic).elsewhere(KEYS))[0] == "holder"
