"""Retention: how long blocks of a class are worth keeping, and how long in DRAM. Knows seconds, no blocks."""

from __future__ import annotations

from dataclasses import dataclass

from fabric.retention import RetentionClass

_HOUR_S = 3600.0
LEAST_WARM_S, MOST_WARM_S = 1 * _HOUR_S, 6 * _HOUR_S


KEEP_S = {
    RetentionClass.DEFAULT: 72 * _HOUR_S,
    RetentionClass.CHAT: 7 * 24 * _HOUR_S,
    RetentionClass.AGENT: 3 * 24 * _HOUR_S,
}
"""Seconds since its last use after which a block of a class is kept no longer; every hit starts them anew."""

LONGEST_S = max(KEEP_S.values())


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a record is kept after its last use: a block as its class says, an anchor `anchor_times` as long."""

    anchor_times: float = 1.0

    def of(self, retention: RetentionClass, is_anchor: bool) -> float:
        """Seconds, where nothing is promised."""
        return self.scaled(KEEP_S[retention], is_anchor)

    def scaled(self, keep_s: float, is_anchor: bool) -> float:
        """Of `keep_s` seconds that a block is kept, what that means for this record."""
        return keep_s * self.anchor_times if is_anchor else keep_s


BY_CLASS = Retention()


@dataclass(frozen=True, slots=True)
class WarmWindow:
    """Idle time after which a block held by a lower tier as well may leave DRAM even without pressure."""

    idle_s: float = LEAST_WARM_S

    def __post_init__(self) -> None:
        """Raises ValueError for a window outside 1 to 6 hours."""
        if not LEAST_WARM_S <= self.idle_s <= MOST_WARM_S:
            raise ValueError(f"a warm window of {self.idle_s:.0f} s; use {LEAST_WARM_S:.0f} to {MOST_WARM_S:.0f} s")
