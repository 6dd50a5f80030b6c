"""Eviction order: which record leaves next and which is not let in. Knows ages, parents, promises; no bytes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.kvstore.policy.appraiser import Appraiser
from services.kvstore.policy.budget import Budgets, Owner
from services.kvstore.policy.ghosts import Ghosts
from services.kvstore.policy.retention import LONGEST_S
from services.kvstore.policy.shelves import Shelves
from services.kvstore.policy.traits import ALONE, Arrival, kind_of
from services.kvstore.policy.worth import Floats

K = TypeVar("K", bound=Hashable)
GHOSTS = 65_536  # records that left and are remembered; about 150 bytes each
_AGAIN_S = 60.0  # until a record that is idle and still here is named again


@dataclass(slots=True, eq=False)
class _Promise:
    owner: Owner
    size: int
    keep_s: float
    until_s: float
    tick: int = 0  # of its last use


@dataclass(frozen=True, slots=True)
class Standing:
    """One record as the order sees it; `owner` and `left_s` are those of its promise, if it has one."""

    age_s: float
    idle_s: float
    uses: int
    owner: Owner | None
    left_s: float


@dataclass(slots=True, eq=False)
class _Node(Generic[K]):
    key: K
    parent: K | None
    used_s: float
    tick: int
    uses: int
    arrival: int
    kind: int
    idle_s: float
    due_s: float  # when it is looked at next for being idle; infinite while others continue it
    children: int
    came_s: float
    promise: _Promise | None = None


class EvictionOrder(Generic[K]):
    """Leaves only, those worth least first; promised ones after all others, never pinned.

    What a record is worth is learned (`policy/worth.py`). The same calls at the same times give the same order.
    """

    def __init__(self, sample: Callable[[K], int], budgets: Budgets, idle_s: float = LONGEST_S) -> None:
        """`sample`: an even spread number of a key, the same in every run. `idle_s`: see `expired`, where `add` says
        none."""
        self._budgets, self._idle_s = budgets, idle_s
        self._nodes: dict[K, _Node[K]] = {}
        self._orphans: dict[K, int] = {}  # children here of a parent that is not
        self._plain: Shelves[_Node[K]] = Shelves(lambda tick, node: self._stands(tick, node, promised=False))
        self._promised: Shelves[_Node[K]] = Shelves(lambda tick, node: self._stands(tick, node, promised=True))
        self._owned: dict[Owner, dict[K, _Node[K]]] = {}  # promised records, used last at the end
        self._ends: list[tuple[float, int, _Node[K], _Promise]] = []  # heap by the earliest time of their end
        self._idle: list[tuple[float, int, _Node[K]]] = []  # heap of records by when each is looked at next
        self._ghosts: Ghosts[K] = Ghosts(GHOSTS)
        self._appraiser: Appraiser[K] = Appraiser(sample, self._appraise)
        self._ticks = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    def add(self, key: K, parent: K | None, now: float, arrival: Arrival = ALONE, idle_s: float | None = None) -> None:
        """Takes `key` in. Its parent need not be here. Raises ValueError where it is here already."""
        node = self._enter(key, parent, now, arrival, idle_s)
        self._appraiser.used(key, node.kind, now)
        self._shelve(node, now)

    def restore(self, key: K, parent: K | None, used_s: float, now: float, idle_s: float | None = None) -> None:
        """Takes in what was here before a restart and used at `used_s`: nothing is learned from finding it.

        Raises ValueError where it is here already.
        """
        self._shelve(self._enter(key, parent, min(used_s, now), ALONE, idle_s), now)

    def worth(self, key: K, now: float) -> float:
        """Hits per second of room that a record is worth now; comparable within one order at one time."""
        node = self._nodes[key]
        return self._plain.worth(node.kind, now - node.used_s)

    def used_s(self, key: K) -> float:
        """When a record was used last."""
        return self._nodes[key].used_s

    def arrival(self, key: K) -> Arrival:
        """How a record came first."""
        return Arrival.of(self._nodes[key].arrival)

    def parent(self, key: K) -> K | None:
        """What a record continues, be it here or not."""
        return self._nodes[key].parent

    def standing(self, key: K, now: float) -> Standing | None:
        """How a record stands, None where it is not here. No use of it."""
        node = self._nodes.get(key)
        if node is None:
            return None
        promise = node.promise if node.promise is not None and node.promise.until_s > now else None
        owner, left_s = (promise.owner, promise.until_s - now) if promise is not None else (None, 0.0)
        return Standing(now - node.came_s, now - node.used_s, node.uses, owner, left_s)

    def touch(self, keys: Sequence[K], now: float) -> None:
        """A prefix was used: `keys` from its start. Its promises start anew."""
        nodes, learn = self._nodes, self._appraiser.used
        for key in reversed(keys):  # parents stay younger than their children
            node = nodes[key]
            node.uses = uses = node.uses + 1
            node.kind = kind = kind_of(uses, node.arrival)
            self._ticks = node.tick = self._ticks + 1
            node.used_s = now
            if node.promise is not None:
                node.promise.until_s = max(node.promise.until_s, now + node.promise.keep_s)
                self._remember(node, node.promise)
            learn(key, kind, now)
            if not node.children:
                self._shelve(node, now)

    def remove(self, key: K, now: float) -> None:
        """Forgets `key`, but for a ghost of it; its parent may become a leaf."""
        node = self._nodes.pop(key)
        self._end_promise(node)
        self._ghosts.keep(key, node.uses, node.arrival)
        if node.children:
            self._orphans[key] = node.children
        self._count_child(node.parent, -1)
        parent = self._nodes.get(node.parent) if node.parent is not None else None
        if parent is not None and not parent.children:
            self._shelve(parent, now)
            if math.isinf(parent.due_s):
                self._look(parent, parent.used_s + parent.idle_s)
        self._bound()

    def admits(self, key: K, arrival: Arrival, now: float, movable: Callable[[K], bool]) -> bool:
        """Whether a record that is not here is worth more than the one that would leave for it.

        A refusal is remembered: the next offer of the same record counts as a use.
        """
        coldest = self._lowest(self._plain, now, movable)
        uses, came = self._ghosts.recall(key, arrival)
        kind = kind_of(uses, came)
        worth = self._plain.worth
        if coldest is None or worth(kind, 0.0) >= worth(coldest.kind, now - coldest.used_s):
            return True
        self.refuse(key, arrival, now)
        return False

    def refuse(self, key: K, arrival: Arrival, now: float) -> None:
        """Remembers a record that is not let in, for what it continues was not: its next offer counts as a use."""
        uses, came = self._ghosts.recall(key, arrival)
        self._ghosts.keep(key, uses, came)
        self._appraiser.used(key, kind_of(uses, came), now)

    def coldest(self, now: float, movable: Callable[[K], bool]) -> K | None:
        """The record to evict next, None if none is movable. Promised records are named only when no other is left."""
        self._end_promises(now)
        node = self._lowest(self._plain, now, movable) or self._lowest(self._promised, now, movable)
        return None if node is None else node.key

    def oldest(self, movable: Callable[[K], bool]) -> K | None:
        """The movable record that was used longest ago, be it continued by others or not; looks at all of them."""
        nodes = (node for node in self._nodes.values() if movable(node.key))
        found = min(nodes, key=lambda node: (node.used_s, node.tick), default=None)
        return None if found is None else found.key

    def expired(self, now: float) -> list[K]:
        """Leaves unused for their idle time and promised to nobody; what they continue comes up once they left."""
        self._end_promises(now)
        found: list[K] = []
        while self._idle and self._idle[0][0] <= now:
            due_s, _, node = heapq.heappop(self._idle)
            if node.due_s != due_s or self._nodes.get(node.key) is not node:
                continue
            if node.children:
                node.due_s = math.inf
            elif node.promise is not None:
                self._look(node, max(node.promise.until_s, now + _AGAIN_S))
            elif now < node.used_s + node.idle_s:
                self._look(node, node.used_s + node.idle_s)
            else:
                found.append(node.key)
                self._look(node, now + _AGAIN_S)
        return found

    def promise(self, key: K, owner: Owner, size_bytes: int, keep_s: float, now: float) -> bool:
        """Prefers others for eviction for `keep_s` after each use; an earlier promise is never shortened.

        Where a budget is full, the promises of records that were used least recently end for it: first the owner's own,
        and where all together are full, anybody's. So none takes room for days after its use. False for a record larger
        than a budget. Promise a prefix from its end, as it is used: then its start is the last to lose.
        """
        node = self._nodes[key]
        if node.promise is None:
            if not self._make_room(owner, size_bytes, now):
                return False
            self._budgets.promise(owner, size_bytes)
            node.promise = _Promise(owner, size_bytes, keep_s, now + keep_s)
            heapq.heappush(self._ends, (node.promise.until_s, self._tick(), node, node.promise))
            if not node.children:
                self._shelve(node, now)
        node.promise.keep_s = max(node.promise.keep_s, keep_s)
        node.promise.until_s = max(node.promise.until_s, now + keep_s)
        self._remember(node, node.promise)
        self._bound()
        return True

    def promise_of(self, key: K, now: float) -> tuple[Owner, float] | None:
        """Whose promise protects a record, and for how long after each use; None where none does."""
        node = self._nodes.get(key)
        promise = node.promise if node is not None else None
        return (promise.owner, promise.keep_s) if promise is not None and promise.until_s > now else None

    def promised_bytes(self, now: float) -> int:
        """Bytes of all records that a promise still protects."""
        self._end_promises(now)
        return self._budgets.promised

    def _enter(self, key: K, parent: K | None, used_s: float, arrival: Arrival, idle_s: float | None) -> _Node[K]:
        if key in self._nodes:
            raise ValueError(f"{key!r} is here already")
        uses, came = self._ghosts.recall(key, arrival)
        self._ghosts.forget(key)
        kind, idle_s = kind_of(uses, came), self._idle_s if idle_s is None else idle_s
        children = self._orphans.pop(key, 0)
        node = _Node(key, parent, used_s, self._tick(), uses, came, kind, idle_s, math.inf, children, used_s)
        self._nodes[key] = node
        self._count_child(parent, 1)
        self._look(node, used_s + idle_s)
        return node

    def _look(self, node: _Node[K], due_s: float) -> None:
        """Looks at a record at `due_s` and not before."""
        node.due_s = due_s
        heapq.heappush(self._idle, (due_s, self._tick(), node))

    def _lowest(self, shelves: Shelves[_Node[K]], now: float, movable: Callable[[K], bool]) -> _Node[K] | None:
        walk = shelves.ascending(now)
        try:
            return next((node for node in walk if movable(node.key)), None)
        finally:
            walk.close()

    def _shelve(self, node: _Node[K], now: float) -> None:
        if node.children:
            return
        shelves = self._plain if node.promise is None else self._promised
        shelves.put(node, now)
        if len(shelves) > 2 * len(self._nodes) + 64:
            shelves.compact()

    def _stands(self, tick: int, node: _Node[K], promised: bool) -> bool:
        here = self._nodes.get(node.key) is node
        return here and node.tick == tick and not node.children and (node.promise is not None) == promised

    def _count_child(self, parent: K | None, change: int) -> None:
        if parent is None:
            return
        node = self._nodes.get(parent)
        if node is not None:
            node.children += change
            return
        count = self._orphans.get(parent, 0) + change
        if count:
            self._orphans[parent] = count
        else:
            self._orphans.pop(parent, None)

    def _end_promises(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, tick, node, promise = heapq.heappop(self._ends)
            if node.promise is not promise:
                continue
            if promise.until_s > now:
                heapq.heappush(self._ends, (promise.until_s, tick, node, promise))
                continue
            self._end_promise(node)
            if node.key in self._nodes:
                self._shelve(node, now)

    def _bound(self) -> None:
        """Drops what was kept of removed records where it outweighs those that are here."""
        most = 2 * len(self._nodes) + 64
        if len(self._idle) > most:
            self._idle = [
                item for item in self._idle if self._nodes.get(item[2].key) is item[2] and item[2].due_s == item[0]
            ]
            heapq.heapify(self._idle)
        if len(self._ends) > most:
            self._ends = [item for item in self._ends if item[2].promise is item[3]]
            heapq.heapify(self._ends)

    def _make_room(self, owner: Owner, size_bytes: int, now: float) -> bool:
        """Ends promises until there is room for one more; False, and none ended, where there never is."""
        if not self._budgets.could_promise(size_bytes):
            return False
        while not self._budgets.can_promise(owner, size_bytes):
            own = self._budgets.crowds(owner, size_bytes)
            node = next(iter(self._owned[owner].values())) if own else self._longest_unused()
            self._end_promise(node)
            self._shelve(node, now)
        return True

    def _longest_unused(self) -> _Node[K]:
        """Of all promised records; at least one is."""
        firsts = (next(iter(nodes.values())) for nodes in self._owned.values())
        return min(firsts, key=lambda node: node.promise.tick if node.promise is not None else 0)

    def _remember(self, node: _Node[K], promise: _Promise) -> None:
        """It is now the youngest of its owner's promised records."""
        nodes = self._owned.setdefault(promise.owner, {})
        nodes.pop(node.key, None)
        nodes[node.key], promise.tick = node, self._tick()

    def _end_promise(self, node: _Node[K]) -> None:
        if node.promise is None:
            return
        owner, nodes = node.promise.owner, self._owned[node.promise.owner]
        self._budgets.end(owner, node.promise.size)
        node.promise = None
        del nodes[node.key]
        if not nodes:
            del self._owned[owner]

    def _appraise(self, worth: Floats) -> None:
        self._plain.appraise(worth)
        self._promised.appraise(worth)

    def _tick(self) -> int:
        self._ticks += 1
        return self._ticks
