"""KV index in this process: what Redis does for several, for one process and for tests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

MAX_KEYS = 1_000_000


class MemoryIndex:
    """Keys with a time to live, the oldest dropped beyond `max_keys`."""

    def __init__(self, ttl_s: float, clock: Callable[[], float], max_keys: int = MAX_KEYS) -> None:
        self._ttl_s, self._clock, self._max_keys = ttl_s, clock, max_keys
        self._holders: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    async def publish(self, keys: Sequence[bytes], instance: str) -> None:
        for key in keys:
            self._holders[key] = (instance, self._clock() + self._ttl_s)
            self._holders.move_to_end(key)
        while len(self._holders) > self._max_keys:
            self._holders.popitem(last=False)

    async def withdraw(self, keys: Sequence[bytes], instance: str) -> None:
        for key in keys:
            if self._holder(key) == instance:
                del self._holders[key]

    async def holders(self, keys: Sequence[bytes]) -> list[str]:
        return [self._holder(key) for key in keys]

    async def close(self) -> None:
        self._holders.clear()

    def _holder(self, key: bytes) -> str:
        instance, expires_at = self._holders.get(key, ("", 0.0))
        return instance if expires_at > self._clock() else ""
