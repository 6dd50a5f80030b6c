"""Who holds which slab of the landing memory. Knows numbers and states, no bytes, no link and no clock of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from fabric.errors import Exhausted, InvalidArgument


class SlabState(StrEnum):
    """free -> granted -> free, or -> quarantined (its writer may still write) -> retired (nobody waits any more)."""

    FREE = "free"
    GRANTED = "granted"
    QUARANTINED = "quarantined"
    RETIRED = "retired"


class Writer(StrEnum):
    """What is known of the writer of a landing when it is released."""

    FINISHED = "finished"  # it acknowledged that it writes no more
    DEAD = "dead"  # its process is proven gone
    NEVER_STARTED = "never_started"  # it never learned of the landing
    UNKNOWN = "unknown"  # it may be frozen in mid-write


@dataclass(slots=True)
class Grant:
    """A run of slabs held for one owner."""

    owner: str
    first: int
    count: int
    state: SlabState = SlabState.GRANTED
    doubted_at: float = 0.0
    readers: int = 0
    fate: Writer | None = field(default=None)


class SlabBook:
    """Bounded memory: grants fail rather than wait, and slabs in doubt never exceed their share by new grants."""

    def __init__(self, slabs: int, slab_bytes: int, max_doubt_share: float) -> None:
        self.slab_bytes = slab_bytes
        self._free = bytearray(b"\1" * slabs)
        self._grants: dict[str, Grant] = {}
        self._max_doubt = max(1, int(slabs * max_doubt_share))
        self.history: Counter[str] = Counter()

    def count(self) -> dict[SlabState, int]:
        """Slabs in each state; their sum is always the size of the pool."""
        totals = dict.fromkeys(SlabState, 0)
        totals[SlabState.FREE] = self._free.count(1)
        for grant in self._grants.values():
            totals[grant.state] += grant.count
        return totals

    @property
    def blocked(self) -> bool:
        """Whether too many slabs are in doubt for anything to be granted."""
        doubted = [grant.count for grant in self._grants.values() if grant.state is not SlabState.GRANTED]
        return sum(doubted) > self._max_doubt

    def take(self, owner: str, nbytes: int) -> Grant:
        """Contiguous slabs for `nbytes` bytes.

        Raises:
            InvalidArgument: the size can never fit, or the owner has a grant already.
            Exhausted: no room now, or too many slabs are in doubt.
        """
        needed = -(-nbytes // self.slab_bytes)
        if nbytes <= 0 or needed > len(self._free):
            raise InvalidArgument(
                f"{nbytes} bytes do not fit a landing pool of {len(self._free) * self.slab_bytes}", field="nbytes"
            )
        if owner in self._grants:
            raise InvalidArgument(f"{owner} holds a landing already", field="owner")
        if self.blocked:
            raise Exhausted(
                "too much landing memory is in doubt",
                fix="use another worker: memory returns when its writers have ended",
                retry_after_s=1.0,
            )
        first = self._first_fit(needed)
        self._free[first : first + needed] = bytes(needed)
        self.history["granted"] += 1
        grant = self._grants[owner] = Grant(owner, first, needed)
        return grant

    def find(self, owner: str) -> Grant | None:
        return self._grants.get(owner)

    def read(self, owner: str) -> Grant:
        """Holds a granted run against reuse while it is copied out: pair with `read_done`.

        Raises:
            InvalidArgument: it is not granted (any more).
        """
        grant = self._grants.get(owner)
        if grant is None or grant.state is not SlabState.GRANTED or grant.fate is not None:
            raise InvalidArgument(f"{owner} holds no landing", field="landing")
        grant.readers += 1
        return grant

    def read_done(self, grant: Grant, now: float) -> None:
        grant.readers -= 1
        if grant.fate is not None:
            self.release(grant.owner, grant.fate, now)

    def release(self, owner: str, writer: Writer, now: float) -> bool:
        """Ends a grant as far as its writer allows. Returns False where there was nothing to end."""
        grant = self._grants.get(owner)
        if grant is None:
            return False
        if grant.readers:
            grant.fate = grant.fate if grant.fate not in (None, Writer.UNKNOWN) else writer
            return True
        if writer is not Writer.UNKNOWN:
            self._free[grant.first : grant.first + grant.count] = b"\1" * grant.count
            del self._grants[owner]
            self.history["freed"] += 1
            return True
        if grant.state is not SlabState.GRANTED:
            return False
        grant.state, grant.doubted_at, grant.fate = SlabState.QUARANTINED, now, None
        self.history["quarantined"] += 1
        return True

    def retire(self, now: float, after_s: float) -> int:
        """Stops waiting for writers that were silent for `after_s` seconds. Returns how many grants that were."""
        old = [
            grant
            for grant in self._grants.values()
            if grant.state is SlabState.QUARANTINED and now - grant.doubted_at >= after_s
        ]
        for grant in old:
            grant.state = SlabState.RETIRED
        self.history["retired"] += len(old)
        return len(old)

    def _first_fit(self, needed: int) -> int:
        """Number of the first slab of a free run of `needed`. Raises Exhausted where there is none."""
        first = self._free.find(b"\1" * needed)
        if first < 0:
            raise Exhausted("landing memory is full", retry_after_s=0.1)
        return first
