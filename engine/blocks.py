"""Block pool: who holds which KV block. Knows block ids and reference counts; knows no tensors and no tokens."""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import Exhausted, IntegrityBroken


class BlockPool:
    """Ids `0..total-1`, each free, held (by one or more requests) or cached (held by nobody, retained for reuse).

    The same class hands out window slots: `resource` names what is counted in errors.
    """

    def __init__(self, total: int, resource: str = "kv blocks") -> None:
        if total < 1:
            raise ValueError(f"a pool of {resource} needs at least one, got {total}")
        self.total, self.resource = total, resource
        self._free = list(range(total - 1, -1, -1))
        self._references = [0] * total
        self._retained = [False] * total
        self._cached = 0

    @property
    def free(self) -> int:
        """Ids that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Ids that only the prefix index retains: they can be forgotten at any time."""
        return self._cached

    @property
    def held(self) -> int:
        """Ids that at least one request holds."""
        return self.total - self.free - self._cached

    def references(self, block: int) -> int:
        """How many requests hold `block`."""
        return self._references[block]

    def can_take(self, count: int) -> bool:
        """Whether `take(count)` would succeed now."""
        return 0 <= count <= self.free

    def take(self, count: int) -> tuple[int, ...]:
        """Hand out `count` free ids, one reference each. Raises Exhausted and takes nothing if there are too few."""
        if not self.can_take(count):
            raise Exhausted(self.resource, needed=count, free=self.free)
        taken = tuple(self._free.pop() for _ in range(count))
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to ids that are held or cached. Raises ValueError for a free id."""
        for block in blocks:
            if self._references[block] == 0:
                if not self._retained[block]:
                    raise ValueError(f"{self.resource}: {block} is free and cannot be shared")
                self._cached -= 1
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference each. Raises ValueError rather than let a count go negative."""
        for block in blocks:
            if self._references[block] == 0:
                raise ValueError(f"{self.resource}: {block} is not held and cannot be released")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._settle(block)

    def retain(self, block: int) -> None:
        """Keep a held id after its last release, for the prefix index. Raises ValueError if free or retained."""
        if self._references[block] == 0 or self._retained[block]:
            raise ValueError(f"{self.resource}: {block} cannot be retained")
        self._retained[block] = True

    def forget(self, block: int) -> None:
        """Undo `retain`; an id nobody holds becomes free. Raises ValueError if it was not retained."""
        if not self._retained[block]:
            raise ValueError(f"{self.resource}: {block} is not retained")
        self._retained[block] = False
        if self._references[block] == 0:
            self._cached -= 1
            self._free.append(block)

    def check(self) -> None:
        """Raise IntegrityBroken unless every id is exactly one of free, cached or held."""
        free = set(self._free)
        idle = [block for block in range(self.total) if self._references[block] == 0]
        cached = {block for block in idle if self._retained[block]}
        if len(free) != len(self._free) or free | cached != set(idle) or free & cached or len(cached) != self._cached:
            raise IntegrityBroken(f"{self.resource}: broken conservation: {self.free} free, {self._cached} cached")

    def _settle(self, block: int) -> None:
        if self._retained[block]:
            self._cached += 1
        else:
            self._free.append(block)
