"""KV index: which kvstore instance holds which block. A hint: it may be empty, late or lost, and is never data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol
from urllib.parse import urlsplit

from fabric.errors import StartError


class Index(Protocol):
    """Block key -> instance. Every entry has a time to live. Failures are the caller's to catch as `IndexLost`."""

    async def publish(self, keys: Sequence[bytes], instance: str) -> None:
        """Says that `instance` holds `keys`; also renews their time to live."""

    async def withdraw(self, keys: Sequence[bytes], instance: str) -> None:
        """Takes back `keys` where `instance` is still named as their holder."""

    async def holders(self, keys: Sequence[bytes]) -> list[str]:
        """Instance of each key, empty where none is known."""

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

            return RedisIndex(url, ttl_s)
        case scheme:
            raise StartError(
                f"no KV index called {scheme!r}", field="index", fix="use memory:// or redis://host:port/db"
            )
