"""Hints: asks the index who else holds a prefix, without ever waiting long for it or failing with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fabric.telemetry import logs
from services.kvstore.index import Index, IndexLost

MAX_ASKED = 1024  # leading keys of one question
_REST_S = 5.0  # after a loss nobody asks again for this long
_log = logs.get("index")


class Hints:
    """What the index says of other instances."""

    def __init__(self, index: Index, instance: str, clock: Callable[[], float]) -> None:
        self._index, self._instance, self._clock = index, instance, clock
        self._rests_until = float("-inf")
        self.lost = 0  # how often the index did not answer
        self.given = 0  # how often it named another instance

    async def elsewhere(self, keys: Sequence[bytes]) -> tuple[str, int]:
        """The other instance that holds most leading ones of `keys`, and how many; ("", 0) if none holds the first."""
        if not keys or self._clock() < self._rests_until:
            return "", 0
        try:
            found = await self._index.holders(keys[:MAX_ASKED])
        except IndexLost:
            self.lost += 1
            self._rests_until = self._clock() + _REST_S
            return "", 0
        others = [lead for lead in found if lead.instance != self._instance]
        if not others:
            return "", 0
        self.given += 1
        best = max(others, key=lambda lead: (lead.blocks, lead.in_memory))
        return best.instance, best.blocks
