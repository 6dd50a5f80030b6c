"""KV index in Redis, shared by all kvstore instances. Knows keys and instances; no answer in time is IndexLost."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.kvstore.index import IndexLost, Lead, Tier

_HELD, _MARK = b"deepinfer:kv:held:", "deepinfer:kv:mark:"
_TIMEOUT_S = 0.25
# A call for each key would cost the event loop more than it costs Redis.
_PUBLISH = """
for i, key in ipairs(KEYS) do
  redis.call('hset', key, ARGV[1], ARGV[i + 2])
  redis.call('pexpire', key, ARGV[2])
end
"""
_UNMARK = "if redis.call('get', KEYS[1]) == ARGV[1] then redis.call('del', KEYS[1]) end"
_WITHDRAW = "for _, key in ipairs(KEYS) do redis.call('hdel', key, ARGV[1]) end"
# For each instance that holds the first key: leading keys, and how many of them in DRAM. Counted there: to read a
# thousand hashes takes 20 ms here. Who is not marked is taken out in the same moment: it finds its mark gone later.
_HOLDERS = """
local blocks, dram, marked, names = {}, {}, {}, {}
for i, key in ipairs(KEYS) do
  local held, someone = redis.call('hgetall', key), false
  for j = 1, #held, 2 do
    local name, value = held[j], held[j + 1]
    if marked[name] == nil then marked[name] = redis.call('get', ARGV[1] .. name) end
    if not marked[name] then
      redis.call('hdel', key, name)
    elseif (blocks[name] or 0) == i - 1 then
      local tier = value == 'dram ' .. marked[name] and 1 or value == 'nvme ' .. marked[name] and 0
      if tier then
        if i == 1 then names[#names + 1] = name end
        blocks[name], dram[name], someone = i, (dram[name] or 0) + tier, true
      end
    end
  end
  if not someone then break end
end
local found = {}
for _, name in ipairs(names) do found[#found + 1] = {name, blocks[name], dram[name]} end
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

    async def holders(self, keys: Sequence[bytes]) -> list[Lead]:
        """Those whose mark is gone are forgotten, too: they announce themselves anew if they live."""
        found = await _answered(self._holders(_keys(keys), [_MARK])) if keys else []
        return [Lead(name.decode(errors="replace"), blocks, in_memory) for name, blocks, in_memory in found]

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
