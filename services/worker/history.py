"""History: the keys that a worker's cache holds, version by version, as its watchers are told. Knows no engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from engine.journal import Changes

MAX_KEPT = 256  # versions; whoever missed more gets the whole set
# Keys of one message, which has a bound. One more than a gateway mirrors, so that it knows: these are not all.
MAX_TOLD = (1 << 18) + 1


@dataclass(frozen=True, slots=True)
class KeyChange:
    """Keys from version `base` to `version`; where `reset`, `added` is the whole set whatever was held before."""

    version: int
    base: int
    added: frozenset[bytes] = frozenset()
    removed: frozenset[bytes] = frozenset()
    reset: bool = False


class KeyHistory:
    """The set at its newest version, and the way there from the versions before it."""

    def __init__(self, keys: Iterable[bytes], version: int) -> None:
        self._keys, self.version = set(keys), version
        self._kept: deque[Changes] = deque(maxlen=MAX_KEPT)

    def apply(self, changes: Changes) -> bool:
        """Takes the next version. False, and nothing taken, where one in between is missing."""
        if changes.version not in (self.version, self.version + 1):
            return False
        if changes.version > self.version:
            self._keys -= changes.removed
            self._keys |= changes.stored
            self._kept.append(changes)
            self.version = changes.version
        return True

    def since(self, version: int | None) -> KeyChange:
        """What makes the newest version out of `version`; the whole set for None, for one too long ago, and where the
        difference is too long. Of the whole set no more than MAX_TOLD.
        """
        change = self._difference(version) if version is not None else None
        if change is None or len(change.added) + len(change.removed) > MAX_TOLD:
            return KeyChange(self.version, 0, frozenset(islice(self._keys, MAX_TOLD)), reset=True)
        return change

    def _difference(self, version: int) -> KeyChange | None:
        if not self.version - len(self._kept) <= version <= self.version:
            return None
        added: set[bytes] = set()
        removed: set[bytes] = set()
        for changes in self._kept:
            if changes.version > version:
                came_back = removed & changes.stored
                left_again = added & changes.removed
                added = (added - left_again) | (changes.stored - came_back)
                removed = (removed - came_back) | (changes.removed - left_again)
        return KeyChange(self.version, version, frozenset(added), frozenset(removed))
