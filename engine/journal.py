"""Journal: which keys entered and left a set since it was last read. Knows keys and versions; holds no set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Changes:
    """What made `version` of a set out of the version before it; nothing where that is the same one."""

    version: int
    stored: frozenset[bytes] = frozenset()
    removed: frozenset[bytes] = frozenset()


class Journal:
    """Of one set, for one reader. What came and left between two readings is told by neither."""

    def __init__(self) -> None:
        self._present: dict[bytes, bool] = {}  # of the keys whose presence differs from the last reading
        self._version = 0

    def stored(self, key: bytes) -> None:
        """`key` was not in the set and is now."""
        self._note(key, present=True)

    def removed(self, key: bytes) -> None:
        """`key` was in the set and is no more."""
        self._note(key, present=False)

    def take(self) -> Changes:
        """What differs from the last reading, as the next version."""
        if self._present:
            self._version += 1
        stored = frozenset(key for key, present in self._present.items() if present)
        changes = Changes(self._version, stored, frozenset(self._present.keys() - stored))
        self._present.clear()
        return changes

    def _note(self, key: bytes, present: bool) -> None:
        if self._present.pop(key, present) is present:
            self._present[key] = present
