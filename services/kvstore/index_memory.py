"""KV index in this process: what Redis does for several, for one process and for tests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

from services.kvstore.index import Lead, Tier

MAX_KEYS = 1_000_000


class MemoryIndex:
    """Keys with a time to live, the oldest dropped beyond `max_keys`."""

    def __init__(self, ttl_s: float, clock: Callable[[], float], max_keys: int = MAX_KEYS) -> None:
        self._ttl_s, self._clock, self._max_keys = ttl_s, clock, max_keys
        self._holders: OrderedDict[bytes, tuple[dict[str, tuple[Tier, str]], float]] = OrderedDict()
        self._marks: dict[str, tuple[str, float]] = {}

    async def mark(self, instance: str, run: str, ttl_s: float) -> bool:
        stood = self._marked(instance) == run
        self._marks[instance] = (run, self._clock() + ttl_s)
        return stood

    async def unmark(self, instance: str, run: str) -> None:
        if self._marked(instance) == run:
            del self._marks[instance]

    async def publish(self, held: Mapping[bytes, Tier], instance: str, run: str) -> None:
        for key, tier in held.items():
            self._holders[key] = (self._of(key) | {instance: (tier, run)}, self._clock() + self._ttl_s)
            self._holders.move_to_end(key)
        while len(self._holders) > self._max_keys:
            self._holders.popitem(last=False)

    async def withdraw(self, keys: Sequence[bytes], instance: str) -> None:
        for key in keys:
            self._of(key).pop(instance, None)

    async def holders(self, keys: Sequence[bytes]) -> list[Lead]:
        first = self._of(keys[0]) if keys else {}
        return [self._lead(instance, keys) for instance in first if self._tier(keys[0], instance)]

    async def close(self) -> None:
        self._holders.clear()

    def _lead(self, instance: str, keys: Sequence[bytes]) -> Lead:
        tiers = list(takewhile(bool, (self._tier(key, instance) for key in keys)))
        return Lead(instance, len(tiers), tiers.count(Tier.DRAM))

    def _tier(self, key: bytes, instance: str) -> Tier | None:
        tier, run = self._of(key).get(instance, (None, ""))
        return tier if run == self._marked(instance) else None

    def _of(self, key: bytes) -> dict[str, tuple[Tier, str]]:
        holders, expires_at = self._holders.get(key, ({}, 0.0))
        return holders if expires_at > self._clock() else {}

    def _marked(self, instance: str) -> str:
        run, expires_at = self._marks.get(instance, ("", 0.0))
        return run if expires_at > self._clock() else ""
