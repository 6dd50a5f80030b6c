"""Filling: how fast what another instance holds already may move here. Knows a rate and a clock; moves nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class FillCounts:
    """What was let in of blocks that another instance holds, and how many writers were sent there instead."""

    filled_bytes: int = 0
    redirected: int = 0


class Filling:
    """Takes one offer whole, then none until `bytes_per_s` has paid for it: filling never takes all of a newcomer."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float]) -> None:
        self._bytes_per_s, self._clock = bytes_per_s, clock
        self._paid_at = float("-inf")
        self.counts = FillCounts()

    def takes(self, size_bytes: int) -> bool:
        """Whether these bytes may come now. True counts them as coming."""
        now = self._clock()
        if now < self._paid_at:
            self.counts.redirected += 1
            return False
        self._paid_at = now + size_bytes / self._bytes_per_s
        self.counts.filled_bytes += size_bytes
        return True
