"""Survivors: which records of a segment that must go are worth writing anew. Pure: knows worths, parents and sizes."""

from __future__ import annotations

from collections.abc import Sequence

from services.kvstore.eviction import EvictionOrder, K

# A moved record takes room from all others: they leave sooner. It must be worth more than what they are worth at that
# age, which is what its own segment's records are worth; and as it costs a write besides, clearly more.
_ABOVE_MEAN = 2.0


def survivors(
    members: Sequence[K], sizes: Sequence[int], order: EvictionOrder[K], room_bytes: float, now: float
) -> list[K]:
    """Chosen `members`, in their order, of at most `room_bytes`; those worth most first, none without its parent.

    Args:
        members: records of one segment as they lie in it, all of them in `order`. sizes: bytes of each.
    """
    if not members:
        return []
    worths = _with_heirs(members, order, now)
    least = _ABOVE_MEAN * sum(order.worth(member, now) for member in members) / len(members)
    chosen: set[K] = set()
    for at in sorted(range(len(members)), key=lambda at: -worths[members[at]]):
        if worths[members[at]] <= least or sizes[at] > room_bytes:
            break
        room_bytes -= sizes[at]
        chosen.add(members[at])
    return [member for member in members if member in chosen]


def _with_heirs(members: Sequence[K], order: EvictionOrder[K], now: float) -> dict[K, float]:
    """What each member is worth, and no less than what continues it in the same segment: it is of no use without."""
    worths: dict[K, float] = {member: order.worth(member, now) for member in members}
    for member in reversed(members):
        parent = order.parent(member)
        if parent in worths:
            worths[parent] = max(worths[parent], worths[member])
    return worths
