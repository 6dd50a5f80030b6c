"""Eviction order: which record leaves next. Knows ages, parents and soft retention; knows no bytes."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from services.kvstore.records import RecordId


@dataclass(slots=True)
class _Node:
    parent: RecordId | None
    used: int
    keep_until: float = 0.0


class EvictionOrder:
    """Least recently used first, leaves before what they continue; retained records after all others, never pinned."""

    def __init__(self) -> None:
        self._nodes: dict[RecordId, _Node] = {}
        self._children: dict[RecordId, set[RecordId]] = {}
        self._leaves: list[tuple[int, RecordId]] = []  # heap; pairs whose age was overtaken are dropped when met
        self._ticks = 0

    def add(self, record: RecordId, parent: RecordId | None) -> None:
        """Takes `record` in as the youngest. Its parent need not be here."""
        self._nodes[record] = _Node(parent, self._tick())
        if parent is not None:
            self._children.setdefault(parent, set()).add(record)
        self._offer(record)

    def touch(self, record: RecordId) -> None:
        """Makes `record` the youngest. Touch a prefix from its end: parents stay younger than their children."""
        self._nodes[record].used = self._tick()
        self._offer(record)

    def keep(self, record: RecordId, until: float) -> None:
        """Prefers others for eviction until `until`; an earlier promise is never shortened."""
        node = self._nodes[record]
        node.keep_until = max(node.keep_until, until)

    def is_kept(self, record: RecordId, now: float) -> bool:
        """Whether a promise of `keep` still holds."""
        return self._nodes[record].keep_until > now

    def remove(self, record: RecordId) -> None:
        """Forgets `record`; its parent may become a leaf."""
        parent = self._nodes.pop(record).parent
        siblings = self._children.get(parent) if parent is not None else None
        if parent is not None and siblings is not None:
            siblings.discard(record)
            if not siblings:
                del self._children[parent]
                self._offer(parent)

    def coldest(self, now: float, movable: Callable[[RecordId], bool]) -> RecordId | None:
        """The record to evict next, None if none is movable. Kept records are named only when no other is left."""
        passed: list[tuple[int, RecordId]] = []
        kept: RecordId | None = None
        found: RecordId | None = None
        while self._leaves and found is None:
            pair = heapq.heappop(self._leaves)
            if not self._is_current(pair):
                continue
            passed.append(pair)
            if movable(pair[1]):
                if self.is_kept(pair[1], now):
                    kept = kept or pair[1]
                else:
                    found = pair[1]
        for pair in passed:
            heapq.heappush(self._leaves, pair)
        return found or kept

    def _is_current(self, pair: tuple[int, RecordId]) -> bool:
        node = self._nodes.get(pair[1])
        return node is not None and node.used == pair[0] and pair[1] not in self._children

    def _offer(self, record: RecordId) -> None:
        node = self._nodes.get(record)
        if node is None or record in self._children:
            return
        heapq.heappush(self._leaves, (node.used, record))
        if len(self._leaves) > 2 * len(self._nodes) + 64:  # touches outnumber evictions: drop the overtaken pairs
            self._leaves = [pair for pair in self._leaves if self._is_current(pair)]
            heapq.heapify(self._leaves)

    def _tick(self) -> int:
        self._ticks += 1
        return self._ticks
