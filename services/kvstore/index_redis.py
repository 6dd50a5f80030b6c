"""KV index in Redis, shared by all kvstore instances. Knows keys and instances; no answer in time is IndexLost."""

from __future__ import annotations

from collections.abc import Sequence

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.kvstore.index import IndexLost

_PREFIX = b"deepinfer:kv:"
_TIMEOUT_S = 0.25
# Deletes a key only where it still names the caller: another instance may have taken it over meanwhile.
_WITHDRAW = "for i, key in ipairs(KEYS) do if redis.call('get', key) == ARGV[1] then redis.call('del', key) end end"


class RedisIndex:
    """One Redis string per block, its value the instance, always with a time to live."""

    def __init__(self, url: str, ttl_s: float) -> None:
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._redis = Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)

    async def publish(self, keys: Sequence[bytes], instance: str) -> None:
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.set(_PREFIX + key, instance, px=self._ttl_ms)
                await pipeline.execute()
        except (RedisError, OSError) as error:
            raise IndexLost(str(error)) from error

    async def withdraw(self, keys: Sequence[bytes], instance: str) -> None:
        try:
            if keys:
                await self._redis.eval(_WITHDRAW, len(keys), *(_PREFIX + key for key in keys), instance)
        except (RedisError, OSError) as error:
            raise IndexLost(str(error)) from error

    async def holders(self, keys: Sequence[bytes]) -> list[str]:
        try:
            found = await self._redis.mget([_PREFIX + key for key in keys]) if keys else []
        except (RedisError, OSError) as error:
            raise IndexLost(str(error)) from error
        return [value.decode() if isinstance(value, bytes) else "" for value in found]

    async def close(self) -> None:
        await self._redis.aclose()
