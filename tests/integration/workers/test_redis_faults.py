"""Redis lost in every way while several kvstores serve: hits are lost and come back, answers stay right (promise 8)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from engine.prefix import PrefixIdentity, block_keys
from services.worker.stores import claim
from tests.support.manystores import Stores, several_stores
from tests.support.oracle import Oracle
from tests.support.promises import Recorder

PROMPTS = [[3 + (index * 7 + number) % 400 for index in range(400)] for number in range(8)]
WHOLE = 384
WAYS = ("flush", "kill", "away", "back", "freeze", "thaw", "flush", "kill")


async def lose(stores: Stores, way: str) -> None:
    redis = stores.redis
    match way:
        case "flush":
            async with Redis.from_url(redis.url) as client:
                await client.flushall()
        case "kill":
            redis.kill()
            await asyncio.to_thread(redis.start, keep_data=False)
        case "away":
            redis.kill()
        case "back":
            await asyncio.to_thread(redis.start, keep_data=False)
        case "freeze":
            redis.process.freeze()
        case "thaw":
            redis.process.thaw()


def name_beyond(stores: Stores, other: str) -> str:
    """A new name that is the home of every prompt where `other` is the only other one."""
    model = stores.stack.engine("prefill").model
    identity = PrefixIdentity(model.revision, model.layout.fingerprint, "exact", model.layout.block_tokens)
    keys = [block_keys(b"tenant", prompt, identity)[0] for prompt in PROMPTS]
    names = (f"{other}-{number}" for number in range(1 << 20))
    return next(name for name in names if all(claim(name, key) > claim(other, key) for key in keys))


@pytest.mark.slow
@pytest.mark.promise(8)
async def test_a_lost_redis_costs_hits_and_never_an_answer(
    model: Path, oracle: Oracle, tmp_path: Path, promise: Recorder
) -> None:
    async with several_stores(model, tmp_path) as stores:
        older = f"older-{tmp_path.name}"
        await stores.start(older)
        for prompt in PROMPTS:
            assert await stores.asked(oracle, prompt) == 0
        await stores.start(name_beyond(stores, older))  # everything is one hint away from now on
        slowest = 0.0
        for way, prompt in zip(WAYS, PROMPTS, strict=True):
            await lose(stores, way)
            await stores.asked(oracle, prompt)  # fails by itself on a wrong answer
            slowest = max(slowest, stores.took_s)
        async with asyncio.timeout(30.0):
            while not await stores.asked(oracle, PROMPTS[0]):
                pass
        assert await stores.asked(oracle, PROMPTS[0]) == WHOLE
    promise(8, "Redis flushed, killed, away, frozen: requests answered right", len(WAYS), exactly=len(WAYS))
    promise(8, "Redis flushed, killed, away, frozen: slowest request", slowest, at_most=3.0, unit="s")
