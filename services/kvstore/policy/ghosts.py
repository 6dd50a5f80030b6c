"""Ghosts: what is remembered of blocks that left or were refused. A bounded table, the oldest forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from services.kvstore.policy.traits import Arrival

K = TypeVar("K", bound=Hashable)


class Ghosts(Generic[K]):
    """Uses and arrival (an index of `Arrival`) per key, of at most `most` keys."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._past: OrderedDict[K, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._past)

    def keep(self, key: K, uses: int, arrival: int) -> None:
        self._past[key] = (uses, arrival)
        self._past.move_to_end(key)
        if len(self._past) > self._most:
            self._past.popitem(last=False)

    def recall(self, key: K, arrival: Arrival) -> tuple[int, int]:
        """Uses, this one included, and how it first came: as `arrival` says where nothing is remembered."""
        past = self._past.get(key)
        return (0, arrival.index) if past is None else (past[0] + 1, past[1])

    def forget(self, key: K) -> None:
        self._past.pop(key, None)
