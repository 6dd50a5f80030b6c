"""KV index in Redis, shared by all kvstore instances. Knows keys and instances; no answer in time is IndexLost."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.kvstore.index import Holding, IndexLost, Tier

_HELD, _MARK = b"deepinfer:kv:held:", "deepinfer:kv:mark:"
_TIMEOUT_S = 0.25
_TIERS = {tier.value.encode(): tier for tier in Tier}
# A call for each key would cost the event loop more than it costs Redis.
_PUBLISH = """
for i, key in ipairs(KEYS) do
  redis.call('hset', key, ARGV[1], ARGV[i + 2])
  redis.call('pexpire', key, ARGV[2])
end
"""
_UNMARK = "if redis.call('get', KEYS[1]) == ARGV[1] then redis.call('del', KEYS[1]) end"
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
    """One Redis hash per block: instance -> tier and run. One string per instance: its mark. All of them expire."""

    def __init__(self, url: str, ttl_s: float) -> None:
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._redis = Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        self._publish = self._redis.register_script(_PUBLISH)
        self._unmark = self._redis.register_script(_UNMARK)
        self._withdraw = self._redis.register_script(_WITHDRAW)
        self._forget = self._redis.register_script(_FORGET)
        self._holders = self._redis.register_script(_HOLDERS)

    async def mark(self, instance: str, run: str, ttl_s: float) -> bool:
        before: bytes | None = await _answered(self._redis.set(_MARK + instance, run, px=round(ttl_s * 1000), get=True))
        return before == run.encode()

    async def unmark(self, instance: str, run: str) -> None:
        await _answered(self._unmark([_MARK + instance], [run]))

    async def publish(self, held: Mapping[bytes, Tier], instance: str, run: str) -> None:
        if held:
            told = [f"{tier} {run}" for tier in held.values()]
            await _answered(self._publish(_keys(held), [instance, self._ttl_ms, *told]))

    async def withdraw(self, keys: Sequence[bytes], instance: str) -> None:
        if keys:
            await _answered(self._withdraw(_keys(keys), [instance]))

    async def holders(self, keys: Sequence[bytes]) -> list[tuple[Holding, ...]]:
        """Those whose mark is gone are forgotten: they announce themselves anew if they live."""
        answers: list[list[bytes]] = await _answered(self._holders(_keys(keys))) if keys else []
        instances = sorted({name for fields in answers for name in fields[::2]})
        if not instances:
            return []
        marks = await _answered(self._redis.mget([_MARK.encode() + instance for instance in instances]))
        runs: dict[bytes, bytes | None] = dict(zip(instances, marks, strict=True))
        for instance in (instance for instance, run in runs.items() if run is None):
            await _answered(self._forget([_MARK.encode() + instance, *_keys(keys[: len(answers)])], [instance]))
        return _leading([_holdings(fields, runs) for fields in answers])

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


def _holdings(fields: Sequence[bytes], runs: Mapping[bytes, bytes | None]) -> tuple[Holding, ...]:
    """Of a hash's fields and values in turn. What a former run told, or whoever else, is no holding."""
    found = []
    for name, value in zip(fields[::2], fields[1::2], strict=True):
        told, _, run = value.partition(b" ")
        if told in _TIERS and run == runs[name]:
            found.append(Holding(name.decode(errors="replace"), _TIERS[told]))
    return tuple(found)


def _leading(found: list[tuple[Holding, ...]]) -> list[tuple[Holding, ...]]:
    return found[: next((at for at, held in enumerate(found) if not held), len(found))]
