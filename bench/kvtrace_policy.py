"""The store's own eviction order behind the replay's cache interface: counts blocks, moves none."""

from __future__ import annotations

from collections.abc import Sequence

from bench.kvtrace_caches import leading
from bench.kvtrace_requests import Request
from services.kvstore.eviction import EvictionOrder
from services.kvstore.policy.budget import Budgets
from services.kvstore.policy.traits import Arrival


def spread(block: int) -> int:
    """An even spread number of a block id (multiplicative hashing, Knuth 6.4)."""
    return block * 2654435761 >> 7 & 0xFFFF


class Policy:
    """One tier of `capacity` blocks; `refuses` is its admission, off where everything passes on its way down."""

    def __init__(self, capacity: int, refuses: bool = True) -> None:
        self._capacity, self._refuses = capacity, refuses
        self.order: EvictionOrder[int] = EvictionOrder(spread, Budgets(0, 0))

    def serve(self, request: Request) -> int:
        hit = leading(request.looked_up, self.order)
        self.take_in(request)
        return hit

    def take_in(self, request: Request) -> None:
        """Uses what is held of the offer and takes in what the policy admits of the rest."""
        offered, now = request.offered, request.time_s
        held = leading(offered, self.order)
        self.order.touch(offered[:held], now)
        new = offered[held:]
        arrivals = [Arrival(len(new), held > 1, block == new[-1]) for block in new]
        path, reachable = set(offered), True
        for index, block in enumerate(new):
            if not reachable:
                self.order.refuse(block, arrivals[index], now)  # of no use without what it continues, but learned of
                continue
            reachable = self._make_room(block, arrivals[index], now, path)
            if reachable:
                parent = offered[held + index - 1] if held + index else None
                self.order.add(block, parent, now, arrivals[index])

    def _make_room(self, block: int, arrival: Arrival, now: float, path: set[int]) -> bool:
        if len(self.order) < self._capacity:
            return True
        if self._refuses and not self.order.admits(block, arrival, now, lambda other: other not in path):
            return False
        coldest = self.order.coldest(now, lambda other: other not in path)
        if coldest is None:
            return False
        self.order.remove(coldest, now)
        return True


class TwoTiers:
    """DRAM over NVMe: everything is written through; a hit is what either holds, block after block."""

    def __init__(self, dram: int, nvme: int) -> None:
        self._tiers = (Policy(dram, refuses=False), Policy(nvme, refuses=False))

    def serve(self, request: Request) -> int:
        hit = leading(request.looked_up, _Either([tier.order for tier in self._tiers]))
        for tier in self._tiers:
            tier.take_in(request)
        return hit


class _Either:
    def __init__(self, orders: Sequence[EvictionOrder[int]]) -> None:
        self._orders = orders

    def __contains__(self, block: object) -> bool:
        return any(block in order for order in self._orders)
