"""Caches to compare the policy with: LRU, Belady's optimum, an infinite one. Simulations over block ids, no bytes."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from bench.kvtrace_requests import Request

NEVER = 1 << 60


class Cache(Protocol):
    """Serves requests in order."""

    def serve(self, request: Request) -> int:
        """Leading blocks of the prompt that were held; takes in what the request offers."""


class Infinite:
    """Holds everything it was ever offered."""

    def __init__(self) -> None:
        self._held: set[int] = set()

    def serve(self, request: Request) -> int:
        hit = leading(request.looked_up, self._held)
        self._held.update(request.offered)
        return hit


class Lru:
    """Least recently used leaves first; a prefix's start is younger than its end."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[int, None] = OrderedDict()

    def serve(self, request: Request) -> int:
        hit = leading(request.looked_up, self._held)
        for block in reversed(request.offered):
            self._held[block] = None
            self._held.move_to_end(block)
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)
        return hit


class Belady:
    """Evicts the block whose next use is farthest, its own newcomers included: knows the whole trace beforehand."""

    def __init__(self, capacity: int, requests: Sequence[Request]) -> None:
        self._capacity = capacity
        self._next = _next_uses(requests)
        self._turn = 0
        self._held: dict[int, int] = {}  # block -> next use
        self._farthest: list[
            tuple[int, int, int]
        ] = []  # heap of (-next use, -depth, block); overtaken ones are dropped

    def serve(self, request: Request) -> int:
        hit = leading(request.looked_up, self._held)
        for depth, (block, next_use) in enumerate(zip(request.offered, self._next[self._turn], strict=True)):
            self._held[block] = next_use
            heapq.heappush(self._farthest, (-next_use, -depth, block))
        while len(self._held) > self._capacity:
            next_use, _, block = heapq.heappop(self._farthest)
            if self._held.get(block) == -next_use:
                del self._held[block]
        self._turn += 1
        return hit


def leading(blocks: Sequence[int], held: object) -> int:
    """How many leading blocks are held."""
    count = 0
    for block in blocks:
        if block not in held:  # type: ignore[operator]
            break
        count += 1
    return count


def _next_uses(requests: Sequence[Request]) -> list[list[int]]:
    """For each request and each block it offers: index of the next request that looks the block up."""
    upcoming: dict[int, int] = {}
    uses: list[list[int]] = []
    for index in range(len(requests) - 1, -1, -1):
        uses.append([upcoming.get(block, NEVER) for block in requests[index].offered])
        upcoming.update(dict.fromkeys(requests[index].looked_up, index))
    return uses[::-1]


def hit_rate(cache: Cache, requests: Sequence[Request], measured_from: int = 0) -> float:
    """Percent of prompt tokens hit by requests from `measured_from` on; those before only warm the cache."""
    hit = total = 0
    for index, request in enumerate(requests):
        tokens = request.hit_tokens(cache.serve(request))
        if index >= measured_from:
            hit, total = hit + tokens, total + request.tokens
    return 100 * hit / total
