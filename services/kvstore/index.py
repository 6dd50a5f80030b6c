"""KV index: which kvstore instances hold which block, and in which tier. A hint: it may be late or lost, never data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol
from urllib.parse import urlsplit

from fabric.errors import StartError


class Tier(StrEnum):
    """Where an instance holds a block; the upper one where it holds it twice."""

    DRAM = "dram"
    NVME = "nvme"


@dataclass(frozen=True, slots=True)
class Lead:
    """How many leading blocks of a prefix an instance holds, and how many of these in DRAM."""

    instance: str
    blocks: int
    in_memory: int


class Index(Protocol):
    """Block key -> holders and tiers. Every entry has a time to live. Raises IndexLost where it does not answer."""

    async def mark(self, instance: str, run: str, ttl_s: float) -> bool:
        """Says that this run of `instance` lives, for `ttl_s`. False if its last mark is gone: entries may be, too."""

    async def unmark(self, instance: str, run: str) -> None:
        """This run of `instance` leaves: nobody is pointed to it any more. Another run's mark stays."""

    async def publish(self, held: Mapping[bytes, Tier], instance: str, run: str) -> None:
        """Says that this run of `instance` holds these keys; also renews their time to live."""

    async def withdraw(self, keys: Sequence[bytes], instance: str) -> None:
        """Takes `instance` back as a holder of `keys`; other holders stay."""

    async def holders(self, keys: Sequence[bytes]) -> list[Lead]:
        """All that hold the first of `keys`. What a run said that is not its instance's marked one does not count."""

    async def close(self) -> None:
        """Ends connections; safe to repeat."""


class IndexLost(Exception):
    """The index did not answer; costs hits, nothing else."""


def open_index(url: str, ttl_s: float, clock: Callable[[], float]) -> Index:
    """Opens `memory://` (this process alone) or `redis://[:password@]host:port/db`.

    Raises:
        StartError: another scheme, naming those that exist.
    """
    match urlsplit(url).scheme:
        case "memory":
            from services.kvstore.index_memory import MemoryIndex

            return MemoryIndex(ttl_s, clock)
        case "redis" | "rediss":
            from services.kvstore.index_redis import RedisIndex

            try:
                return RedisIndex(url, ttl_s)
            except ValueError as error:
                raise StartError(f"no Redis URL: {error}", field="index", fix="use redis://host:port/db") from error
        case scheme:
            raise StartError(
                f"no KV index called {scheme!r}", field="index", fix="use memory:// or redis://host:port/db"
            )
