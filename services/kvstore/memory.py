"""Slab memory: which byte ranges of one slab are free. Knows offsets and sizes; knows no records and no bytes."""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGNMENT = 64  # bytes: one cache line, so that no two records share one


class SlabAllocator:
    """Best-fit allocator over `[0, capacity)`; neighbouring free ranges are joined when a range is given back.

    Ranges start at multiples of `alignment` and have as many bytes.
    """

    def __init__(self, capacity_bytes: int, alignment: int = ALIGNMENT) -> None:
        if capacity_bytes < alignment:
            raise ValueError(f"a slab needs at least {alignment} bytes, got {capacity_bytes}")
        self._alignment = alignment
        self.capacity = capacity_bytes // alignment * alignment
        self._taken: dict[int, int] = {}  # offset -> size
        self._free_at: dict[int, int] = {0: self.capacity}  # start -> size
        self._free_end: dict[int, int] = {self.capacity: 0}  # end -> start
        self._used = 0
        self._by_size: list[tuple[int, int]] = [(self.capacity, 0)]  # sorted (size, start)

    @property
    def used(self) -> int:
        """Bytes taken, rounding included."""
        return self._used

    def rounded(self, size_bytes: int) -> int:
        """Bytes of the range that `take` finds for so many."""
        return -(-size_bytes // self._alignment) * self._alignment

    def take(self, size_bytes: int) -> int | None:
        """Offset of a range of at least `size_bytes`, or None where no free range is large enough."""
        size = self.rounded(size_bytes)
        at = bisect_left(self._by_size, (size, 0))
        if size_bytes < 1 or at == len(self._by_size):
            return None
        free_size, start = self._by_size[at]
        self._remove_free(start, free_size)
        if free_size > size:
            self._add_free(start + size, free_size - size)
        self._taken[start] = size
        self._used += size
        return start

    def give(self, offset: int) -> None:
        """Takes back what `take` returned. KeyError for anything else: giving twice is a defect."""
        start, size = offset, self._taken.pop(offset)
        self._used -= size
        after = self._free_at.get(start + size)
        if after is not None:
            self._remove_free(start + size, after)
            size += after
        before = self._free_end.get(start)
        if before is not None:
            self._remove_free(before, start - before)
            start, size = before, size + start - before
        self._add_free(start, size)

    def _add_free(self, start: int, size: int) -> None:
        self._free_at[start], self._free_end[start + size] = size, start
        insort(self._by_size, (size, start))

    def _remove_free(self, start: int, size: int) -> None:
        del self._free_at[start], self._free_end[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
