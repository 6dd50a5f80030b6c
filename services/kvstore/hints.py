"""Hints: the index as the store uses it, without ever waiting long for it or failing with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fabric.telemetry import logs
from services.kvstore.index import Index, IndexLost

MAX_QUEUED = 256  # announcements; beyond, the oldest are dropped: a hint that is missing costs a hit
_REST_S = 5.0  # after a loss nobody asks again for this long
_log = logs.get("index")


class Hints:
    """Announces what this instance holds, in the background, and asks who holds the rest."""

    def __init__(self, index: Index, instance: str, clock: Callable[[], float]) -> None:
        self._index, self._instance, self._clock = index, instance, clock
        self._queue: asyncio.Queue[tuple[bool, tuple[bytes, ...]]] = asyncio.Queue(MAX_QUEUED)
        self._rests_until = float("-inf")
        self.lost = 0  # how often the index did not answer

    def holds(self, keys: Sequence[bytes]) -> None:
        """Announces keys whose records are committed, or renews them."""
        self._enqueue(True, keys)

    def dropped(self, keys: Sequence[bytes]) -> None:
        """Takes announcements back."""
        self._enqueue(False, keys)

    async def elsewhere(self, keys: Sequence[bytes]) -> tuple[str, int]:
        """The other instance that holds the first of `keys`, and how many leading ones it holds; ("", 0) if none."""
        if not keys or self._clock() < self._rests_until:
            return "", 0
        try:
            holders = await self._index.holders(keys)
        except IndexLost:
            self._rest()
            return "", 0
        if holders[0] in ("", self._instance):
            return "", 0
        count = next((at for at, holder in enumerate(holders) if holder != holders[0]), len(holders))
        return holders[0], count

    async def run(self) -> None:
        """Sends announcements until cancelled."""
        while True:
            held, keys = await self._queue.get()
            if self._clock() < self._rests_until:
                continue
            try:
                await (self._index.publish if held else self._index.withdraw)(keys, self._instance)
            except IndexLost:
                self._rest()

    def _enqueue(self, held: bool, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        if self._queue.full():
            self._queue.get_nowait()
        self._queue.put_nowait((held, tuple(keys)))

    def _rest(self) -> None:
        self.lost += 1
        self._rests_until = self._clock() + _REST_S
        _log.warning("the KV index does not answer; hits of other instances are lost meanwhile", rest_s=_REST_S)
