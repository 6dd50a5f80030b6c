"""Caches of the field that the policy has to beat: S3-FIFO and W-TinyLFU. Simulations over block ids, no bytes.

Blocks of a prompt come in from its end to its start, as in `Lru`: what others continue is the younger one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from bench.kvtrace_caches import leading
from bench.kvtrace_requests import Request

_SMALL_SHARE = 0.1
_MOST_USES = 3


class S3Fifo:
    """Three queues (Yang et al., SOSP 2023): what is not used again while it passes the small one is not kept."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._most_small = capacity, max(1, round(_SMALL_SHARE * capacity))
        self._uses: dict[int, int] = {}  # of what is held
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def serve(self, request: Request) -> int:
        hit = leading(request.looked_up, self._uses)
        for block in reversed(request.offered):
            if block in self._uses:
                self._uses[block] = min(self._uses[block] + 1, _MOST_USES)
            else:
                self._insert(block)
        return hit

    def _insert(self, block: int) -> None:
        while len(self._uses) >= self._capacity:
            self._evict()
        self._uses[block] = 0
        if block in self._ghosts:
            del self._ghosts[block]
            self._main[block] = None
        else:
            self._small[block] = None

    def _evict(self) -> None:
        """One step: a block leaves, or moves to where it stays longer."""
        if self._small and (len(self._small) >= self._most_small or not self._main):
            block, _ = self._small.popitem(last=False)
            if self._uses[block] > 1:
                self._main[block] = None
                self._uses[block] = 0
                return
            self._ghosts[block] = None
            if len(self._ghosts) > self._capacity - self._most_small:
                self._ghosts.popitem(last=False)
        else:
            block, _ = self._main.popitem(last=False)
            if self._uses[block]:
                self._uses[block] -= 1
                self._main[block] = None
                return
        del self._uses[block]


_WINDOW_SHARE, _PROTECTED_SHARE = 0.01, 0.8
_SAMPLE = 10  # uses per block of room between two halvings
_ROWS, _MOST_COUNT = 4, 15
_MIXERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)


class Sketch:
    """How often blocks were used lately, never too low: count-min with conservative update, halved now and then."""

    def __init__(self, capacity: int) -> None:
        self._bits = max(8, (_ROWS * capacity).bit_length())
        self._rows = [bytearray(1 << self._bits) for _ in range(_ROWS)]
        self._left = self._period = _SAMPLE * capacity

    def add(self, block: int) -> None:
        count = self.count(block)
        for row, cell in self._cells(block):
            row[cell] = max(row[cell], min(count + 1, _MOST_COUNT))
        self._left -= 1
        if not self._left:
            self._left = self._period
            self._rows = [bytearray(count >> 1 for count in row) for row in self._rows]

    def count(self, block: int) -> int:
        return min(row[cell] for row, cell in self._cells(block))

    def _cells(self, block: int) -> Iterator[tuple[bytearray, int]]:
        mask = (1 << 64) - 1
        for row, mixer in zip(self._rows, _MIXERS, strict=True):
            yield row, ((block + 1) * mixer & mask) >> 64 - self._bits


class WTinyLfu:
    """A small LRU window before a segmented LRU; what leaves the window must have been used more often than what would
    leave for it (Einziger, Friedman and Manes, ACM ToS 2017)."""

    def __init__(self, capacity: int) -> None:
        self._most_window = max(1, round(_WINDOW_SHARE * capacity))
        self._most_main = capacity - self._most_window
        self._most_protected = round(_PROTECTED_SHARE * self._most_main)
        self._window: OrderedDict[int, None] = OrderedDict()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._sketch = Sketch(capacity)

    def __contains__(self, block: object) -> bool:
        return block in self._window or block in self._probation or block in self._protected

    def serve(self, request: Request) -> int:
        hit = leading(request.looked_up, self)
        for block in reversed(request.offered):
            self._sketch.add(block)
            self._use(block)
        return hit

    def _use(self, block: int) -> None:
        if block in self._protected:
            self._protected.move_to_end(block)
        elif block in self._probation:
            del self._probation[block]
            self._protected[block] = None
            if len(self._protected) > self._most_protected:
                self._probation[self._protected.popitem(last=False)[0]] = None
        else:
            self._window[block] = None
            self._window.move_to_end(block)
            if len(self._window) > self._most_window:
                self._admit(self._window.popitem(last=False)[0])

    def _admit(self, block: int) -> None:
        if len(self._probation) + len(self._protected) < self._most_main:
            self._probation[block] = None
            return
        shelf = self._probation or self._protected
        if not shelf:
            return
        victim = next(iter(shelf))
        if self._sketch.count(block) > self._sketch.count(victim):
            del shelf[victim]
            self._probation[block] = None
