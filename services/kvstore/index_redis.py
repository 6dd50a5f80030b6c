"""KV index in Redis, shared by all kvstore instances. Knows keys and instances; no answer in time is IndexLost."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.kvstore.index import Holding, IndexLost, Tier

_HELD, _MARK = b"deepinfer:kv:held:", "deepinfer:kv:mark:"
_TIMEOUT_S = 0.25
# A call for each key would cost the event loop more than it costs Redis.
_PUBLISH = """
for i, key in ipairs(KEYS) do
  redis.call('hset', key, ARGV[1], ARGV[i + 2])
  redis.call('pexpire', key, ARGV[2])
end
"""
_WITHDRAW = "for _, key in ipairs(KEYS) do redis.call('hdel', key, ARGV[1]) end"
# The mark is looked at in the same moment: whoever marks itself later finds its mark gone and tells everything anew.
_FORGET = """
if redis.call('exists', KEYS[1]) == 1 then return end
for i = 2, #KEYS do redis.call('hdel', KEYS[i], ARGV[1]) end
"""
_HOLDERS = """
local found = {}
for i, key in ipairs(KEYS) do
  local held = redis.call('hgetall', key)
  if #held == 0 then break end
  found[i] = held
end
return found
"""


class RedisIndex:
    """One Redis hash per block: instance -> tier. One string per instance, its mark. All with a time to live."""

    def __init__(self, url: str, ttl_s: float) -> None:
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._redis = Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        self._publish = self._redis.register_script(_PUBLISH)
        self._withdraw = self._redis.register_script(_WITHDRAW)
        self._forget = self._redis.register_script(_FORGET)
        self._holders = self._redis.register_script(_HOLDERS)

    async def mark(self, instance: str, run: str, ttl_s: float) -> bool:
        before: bytes | None = await _answered(self._redis.set(_MARK + instance, run, px=round(ttl_s * 1000), get=True))
        return before == run.encode()

    async def publish(self, held: Mapping[bytes, Tier], instance: str) -> None:
        if held:
            await _answered(self._publish(_keys(held), [instance, self._ttl_ms, *held.values()]))

    async def withdraw(self, keys: Sequence[bytes], instance: str) -> None:
        if keys:
            await _answered(self._withdraw(_keys(keys), [instance]))

    async def holders(self, keys: Sequence[bytes]) -> list[tuple[Holding, ...]]:
        """Those whose mark is gone are not told of, and forgotten: they announce themselves anew if they live."""
        answers: list[list[bytes]] = await _answered(self._holders(_keys(keys))) if keys else []
        found = [_holdings(fields) for fields in answers]
        instances = sorted({holding.instance for held in found for holding in held})
        if not instances:
            return []
        marks = await _answered(self._redis.mget([_MARK + instance for instance in instances]))
        dead = {instance for instance, mark in zip(instances, marks, strict=True) if mark is None}
        for instance in dead:
            await _answered(self._forget([_MARK + instance, *_keys(keys[: len(found)])], [instance]))
        return _leading([tuple(each for each in held if each.instance not in dead) for held in found])

    async def close(self) -> None:
        await self._redis.aclose()


async def _answered(asked: Awaitable[Any]) -> Any:
    """Raises IndexLost for no answer and for one that makes no sense."""
    try:
        return await asked
    except (RedisError, OSError) as error:
        raise IndexLost(str(error)) from error


def _keys(keys: Mapping[bytes, Tier] | Sequence[bytes]) -> list[bytes]:
    return [_HELD + key for key in keys]


def _holdings(fields: Sequence[bytes]) -> tuple[Holding, ...]:
    """Of a hash's fields and values in turn. What another version wrote, or whoever else, is no holding."""
    tiers = {tier.value.encode(): tier for tier in Tier}
    pairs = zip(fields[::2], fields[1::2], strict=True)
    return tuple(Holding(name.decode(errors="replace"), tiers[value]) for name, value in pairs if value in tiers)


def _leading(found: list[tuple[Holding, ...]]) -> list[tuple[Holding, ...]]:
    return found[: next((at for at, held in enumerate(found) if not held), len(found))]
