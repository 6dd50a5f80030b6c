"""Shelves: evictable blocks by kind and age, what is worth least first. Knows worths, no parents and no bytes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from typing import Generic, Protocol, TypeVar

import numpy as np

from services.kvstore.policy.ages import BINS, EDGES, age_bin
from services.kvstore.policy.traits import KINDS
from services.kvstore.policy.worth import Floats

CELLS = KINDS * BINS
_SWEEP_S = 1.0


class Placed(Protocol):
    """What stands on a shelf. `tick` grows with every use of any block: an entry with an older one was overtaken."""

    tick: int
    used_s: float
    kind: int


P = TypeVar("P", bound=Placed)
Entry = tuple[int, P]


class Shelves(Generic[P]):
    """One heap of entries per kind and age, oldest use first; entries that were overtaken are dropped when met."""

    def __init__(self, is_current: Callable[[int, P], bool]) -> None:
        self._is_current = is_current
        self._heaps: list[list[Entry[P]]] = [[] for _ in range(CELLS)]
        self._worth = np.zeros(CELLS)
        self._rank = list(range(CELLS))  # of each cell, least worth first
        self._cell = list(range(CELLS))  # of each rank
        self._filled = 0  # bit r: the heap of rank r is not empty
        self._swept_s = float("-inf")
        self._entries = 0

    def __len__(self) -> int:
        """Entries, overtaken ones included."""
        return self._entries

    def appraise(self, worth: Floats) -> None:
        """Sorts the shelves anew. `worth`: `[KINDS, BINS]`; between equals the older age leaves first."""
        self._worth = worth.reshape(-1)
        ages = np.tile(np.arange(BINS), KINDS)
        self._cell = np.lexsort((-ages, self._worth)).tolist()
        for rank, cell in enumerate(self._cell):
            self._rank[cell] = rank
        self._filled = sum(1 << self._rank[cell] for cell in range(CELLS) if self._heaps[cell])

    def worth(self, kind: int, age_s: float) -> float:
        return float(self._worth[kind * BINS + age_bin(age_s)])

    def put(self, placed: P, now: float) -> None:
        """Places a block where its kind and age say."""
        self._push(placed.kind * BINS + age_bin(now - placed.used_s), (placed.tick, placed))

    def ascending(self, now: float) -> Generator[P, None, None]:
        """Blocks from the one that is worth least on. Placing, removing or using blocks ends the walk."""
        self._sweep(now)
        left = self._filled
        while left:
            lowest = left & -left
            left ^= lowest
            heap = self._heaps[self._cell[lowest.bit_length() - 1]]
            passed: list[Entry[P]] = []
            try:
                while heap:
                    entry = heapq.heappop(heap)
                    self._entries -= 1
                    if self._is_current(*entry):
                        passed.append(entry)
                        yield entry[1]
            finally:
                for entry in passed:
                    heapq.heappush(heap, entry)
                self._entries += len(passed)
                if not heap:
                    self._filled &= ~lowest

    def compact(self) -> None:
        """Drops every overtaken entry."""
        for cell, heap in enumerate(self._heaps):
            kept = [entry for entry in heap if self._is_current(*entry)]
            self._entries -= len(heap) - len(kept)
            heapq.heapify(kept)
            self._heaps[cell] = kept
            if not kept:
                self._filled &= ~(1 << self._rank[cell])

    def _sweep(self, now: float) -> None:
        """Moves what has aged into the next bins, at most once a second."""
        if now - self._swept_s < _SWEEP_S:
            return
        self._swept_s = now
        for cell in range(CELLS - 1, -1, -1):
            heap, bin_ = self._heaps[cell], cell % BINS
            if not heap or bin_ == BINS - 1:
                continue
            while (heap and now - heap[0][1].used_s >= EDGES[bin_ + 1]) or (heap and not self._is_current(*heap[0])):
                entry = heapq.heappop(heap)
                self._entries -= 1
                if self._is_current(*entry):
                    self.put(entry[1], now)
            if not heap:
                self._filled &= ~(1 << self._rank[cell])

    def _push(self, cell: int, entry: Entry[P]) -> None:
        heapq.heappush(self._heaps[cell], entry)
        self._entries += 1
        self._filled |= 1 << self._rank[cell]
