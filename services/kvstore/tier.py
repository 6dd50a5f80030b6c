"""DRAM tier: verified records inside one slab. Knows prefixes, room and pins; knows no network and no index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fabric.kvlink.verify import digest
from fabric.records import Extent
from services.kvstore.eviction import EvictionOrder, Standing
from services.kvstore.memory import ALIGNMENT, SlabAllocator
from services.kvstore.policy.budget import Budgets, Owner
from services.kvstore.policy.retention import BY_CLASS, Retention, WarmWindow
from services.kvstore.policy.traits import ALONE, Arrival
from services.kvstore.records import BlockName, Identity, Record, RecordId, RecordKind, sample

Bytes = npt.NDArray[np.uint8]


def zeros(nbytes: int) -> Bytes:
    """Memory of this process alone."""
    return np.zeros(nbytes, np.uint8)


@dataclass(frozen=True, slots=True)
class Held:
    """How much of a prefix is here: `blocks` leading blocks, `anchored` of them up to the last anchor."""

    blocks: int
    anchored: int


class DramTier:
    """Owns `memory`. A record is visible only after `admit`; its bytes stay while it is pinned, even after a drop."""

    def __init__(
        self,
        capacity_bytes: int,
        clock: Callable[[], float],
        warm: WarmWindow | None = None,
        budgets: Budgets | None = None,
        retention: Retention = BY_CLASS,
        alignment: int = ALIGNMENT,
        allocate: Callable[[int], Bytes] = zeros,
    ) -> None:
        """allocate: gives memory of so many bytes; alignment: of records in it.

        warm: how long what also `lies_below` stays unused; None where nothing is below: then as its class says.

        budgets: of what may be promised; by default half of the memory, to one owner as to all.
        """
        self._slab = SlabAllocator(capacity_bytes, alignment)
        self.memory = allocate(self._slab.capacity)
        self._clock, self._warm, self._retention = clock, warm, retention
        self._records: dict[RecordId, Record] = {}
        self._budgets = budgets or Budgets(self.capacity // 2, self.capacity // 2)
        self._order: EvictionOrder[RecordId] = EvictionOrder(sample, self._budgets)
        self._pins: Counter[int] = Counter()
        self._doomed: set[int] = set()
        self.evicted: Callable[[Record], None] = lambda record: None
        self.lies_below: Callable[[Record], bool] = lambda record: False  # asked of what is idle, and of nothing else

    def __len__(self) -> int:
        return len(self._records)

    @property
    def ids(self) -> KeysView[RecordId]:
        """Names of all records, as they are now."""
        return self._records.keys()

    @property
    def capacity(self) -> int:
        return self._slab.capacity

    @property
    def used(self) -> int:
        """Bytes that records take, those being written or dropped while pinned included."""
        return self._slab.used

    def find(self, kind: RecordKind, name: BlockName, identity: Identity) -> Record | None:
        """The record, only if its tokens and identity are those asked for."""
        record = self._records.get(RecordId(kind, name.key))
        return record if record is not None and record.answers(name, identity) else None

    def by_id(self, record: RecordId) -> Record | None:
        """The record of this name, whatever tokens it stands for."""
        return self._records.get(record)

    def standing(self, record: RecordId) -> Standing | None:
        """Age, idle time and promise of a record; None where it is not here. No use of it."""
        return self._order.standing(record, self._clock())

    @property
    def promised(self) -> int:
        """Bytes that promises protect now."""
        return self._order.promised_bytes(self._clock())

    def lookup(self, names: Sequence[BlockName], identity: Identity) -> Held:
        """Leading blocks held, and up to which anchor."""
        blocks = anchored = 0
        for name in names:
            if self.find(RecordKind.BLOCK, name, identity) is None:
                break
            blocks += 1
            if self.find(RecordKind.ANCHOR, name, identity) is not None:
                anchored = blocks
        return Held(blocks, anchored)

    def collect(self, names: Sequence[BlockName], identity: Identity, anchor: bool) -> list[Record]:
        """Leading blocks of `names` and, where `anchor` and all are here, the last one's anchor. No `use` of them."""
        found = [self.find(RecordKind.BLOCK, name, identity) for name in names]
        records = [record for record in found[: found.index(None) if None in found else None] if record is not None]
        last = self.find(RecordKind.ANCHOR, names[-1], identity) if anchor and len(records) == len(names) else None
        return records if last is None else [*records, last]

    def use(self, records: Iterable[Record]) -> list[Record]:
        """A prefix is read: those of `records` that are still here become young, and are returned."""
        here = [record for record in records if self._records.get(record.id) is record]
        self._order.touch([record.id for record in here], self._clock())
        return here

    def refresh(self, prefix: Sequence[RecordId], older_s: float) -> None:
        """A prefix was used, from its start: what of it is here and was not used for `older_s`."""
        now = self._clock()
        here = [record for record in prefix if record in self._order]
        self._order.touch([record for record in here if now - self._order.used_s(record) >= older_s], now)

    def is_intact(self, record: Record) -> bool:
        """Whether every extent still has its digest. Reads all bytes: pin the record and call from a worker thread."""
        return all(digest(view) == extent.digest for extent, view in self.views(record))

    def views(self, record: Record) -> Iterator[tuple[Extent, Bytes]]:
        """Each extent with its bytes in the slab."""
        for extent in record.extents:
            start = record.offset + extent.offset
            yield extent, self.memory[start : start + extent.size]

    def admits(self, record: RecordId, size_bytes: int, arrival: Arrival) -> bool:
        """Whether there is room for a record that is not here, or something here is worth less than it."""
        if self._slab.used + size_bytes <= self.capacity:
            return True
        return self._order.admits(record, arrival, self._clock(), self._is_movable)

    def take(self, size_bytes: int) -> int | None:
        """Offset of room for one record, evicting as needed; None if even that does not make room."""
        if size_bytes > self.capacity:
            return None
        self.drop_idle()
        while (offset := self._slab.take(size_bytes)) is None:
            coldest = self._order.coldest(self._clock(), self._is_movable)
            if coldest is None and self._warm is not None:  # one long prefix whose end is being read: it is below too
                coldest = self._order.oldest(self._is_movable)
            if coldest is None:
                return None
            self.drop(self._records[coldest])
        return offset

    def room(self, offset: int, size_bytes: int) -> Bytes:
        """What `take` took for so many bytes, up to the next record's alignment."""
        return self.memory[offset : offset + self._slab.rounded(size_bytes)]

    def give(self, offset: int) -> None:
        """Gives back room that was taken and not admitted."""
        self._slab.give(offset)

    def admit(self, record: Record, arrival: Arrival = ALONE) -> bool:
        """Makes a verified record visible. False, and its room given back, where another one has its name."""
        if record.id in self._records:
            self._slab.give(record.offset)
            return False
        self._records[record.id] = record
        idle_s = self._kept_s(record) if self._warm is None else self._warm.idle_s
        self._order.add(record.id, record.parent_id, self._clock(), arrival, idle_s)
        return True

    def arrival(self, record: RecordId) -> Arrival:
        """How a record that is here came first."""
        return self._order.arrival(record)

    def drop(self, record: Record) -> None:
        """Forgets a record at once, and with a block its anchor, useless alone; bytes go when the last pin does."""
        if self._records.get(record.id) is not record:
            return
        anchor = self._records.get(RecordId(RecordKind.ANCHOR, record.id.key))
        if anchor is not None and anchor is not record:
            self.drop(anchor)
        del self._records[record.id]
        self._order.remove(record.id, self._clock())
        if self._pins[record.offset]:
            self._doomed.add(record.offset)
        else:
            self._slab.give(record.offset)
        self.evicted(record)

    def drop_idle(self) -> None:
        """Drops what nobody used for the time of its class or, above another tier, for the warm window."""
        while idle := [record for record in self._order.expired(self._clock()) if self._may_leave(record)]:
            for record in idle:
                self.drop(self._records[record])

    @contextmanager
    def pinned(self, records: Iterable[Record]) -> Iterator[None]:
        """Keeps the bytes of `records` in place."""
        offsets = [record.offset for record in records]
        self._pins.update(offsets)
        try:
            yield
        finally:
            for offset in offsets:
                self._unpin(offset)

    def promise_of(self, record: RecordId) -> tuple[Owner, float] | None:
        """Whose promise protects a record, and for how long after each use; None where none does."""
        return self._order.promise_of(record, self._clock())

    def retain(self, keys: Iterable[bytes], keep_s: float, budget_bytes: int, owner: Owner) -> dict[RecordId, int]:
        """Prefers others for eviction for `keep_s` after each use. Returns the bytes of each record retained.

        `keys` of a prefix from its start. Those beyond `budget_bytes`, or the owner's whole budget, are left out; where
        budgets are full already, promises of records that were used longest ago end for these.
        """
        chosen: list[Record] = []
        left = min(budget_bytes, self._budgets.owner_bytes)
        for record in (self._records.get(RecordId(kind, key)) for key in keys for kind in RecordKind):
            if record is not None and record.size <= left:
                chosen.append(record)
                left -= record.size
        now, order = self._clock(), self._order
        scaled = self._retention.scaled
        kept = [
            record
            for record in reversed(chosen)
            if order.promise(record.id, owner, record.size, scaled(keep_s, record.id.kind is RecordKind.ANCHOR), now)
        ]
        return {record.id: record.size for record in kept}

    def _may_leave(self, record: RecordId) -> bool:
        if not self._is_movable(record):
            return False
        held = self._records[record]
        unused_s = self._clock() - self._order.used_s(record)
        return unused_s >= self._kept_s(held) or self.lies_below(held)

    def _kept_s(self, record: Record) -> float:
        return self._retention.of(record.retention, record.id.kind is RecordKind.ANCHOR)

    def _is_movable(self, record: RecordId) -> bool:
        return not self._pins[self._records[record].offset]

    def _unpin(self, offset: int) -> None:
        self._pins[offset] -= 1
        if self._pins[offset] == 0:
            del self._pins[offset]
            if offset in self._doomed:
                self._doomed.remove(offset)
                self._slab.give(offset)
