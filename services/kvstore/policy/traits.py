"""Traits: what tells kinds of blocks apart when their next use is guessed. Knows numbers, no blocks and no time."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

_USES = (1, 2, 3, 5, 9)  # lower bounds of the kinds of blocks that were used again: how often
_RUNS = (0, 3, 9, 17, 33, 65, 129)  # lower bounds of the classes of how many new blocks came together
ARRIVALS = 2 * len(_RUNS) + 1
KINDS = ARRIVALS + len(_USES)


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a block came first: in a run of `run` new blocks, as its last or not, continuing a held prefix or not."""

    run: int
    continues: bool = False
    last: bool = False

    @property
    def index(self) -> int:
        """Number in `[0, ARRIVALS)`."""
        return ARRIVALS - 1 if self.last else 2 * (bisect_right(_RUNS, self.run) - 1) + self.continues

    @classmethod
    def of(cls, index: int) -> Arrival:
        """An arrival of that index."""
        return cls(1, last=True) if index == ARRIVALS - 1 else cls(_RUNS[index // 2], bool(index % 2))


ALONE = Arrival(1)
_USED = [ARRIVALS - 1 + bisect_right(_USES, uses) for uses in range(_USES[-1] + 1)]


def kind_of(uses: int, arrival: int) -> int:
    """Kind, in `[0, KINDS)`, of a block that was used again `uses` times and came as `arrival` (an index) says.

    How it came stops to matter with the first use: finer kinds were measured to be seen too rarely to be learned.
    """
    return arrival if uses == 0 else _USED[min(uses, _USES[-1])]
