"""Index of the segments: which record lies where, and what it is worth. Knows places, times, bytes; reads nothing.

A record is here as long as its segment is, and wanted as long as the eviction order has it. What the order lets go of,
to stay within its budget, can still be read and is wanted again once it was; it is not written anew when its segment
goes. So no room is lost, and a segment of which little is wanted can be found. Other copies of a record, older ones,
what was forgotten and what no sync confirmed, are remembered until their segment goes: none may outlive an erasure.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, KeysView
from dataclasses import dataclass

from fabric.retention import RetentionClass
from services.kvstore.eviction import EvictionOrder
from services.kvstore.nvme.files import Place
from services.kvstore.nvme.format import Stored
from services.kvstore.policy.budget import Budgets, Owner
from services.kvstore.policy.retention import BY_CLASS, Retention
from services.kvstore.policy.traits import ALONE, Arrival
from services.kvstore.records import RecordId, RecordKind, sample

# Share of the capacity that is wanted: the less, the emptier are the segments that go, and the less is written anew.
# At 0.9 a third of all writes were; at 0.7 hits were lost (docs/kvstore.md).
_WANTED_SHARE = 0.8
_TRIMMED = 1024  # records at a time: some 20 ms


@dataclass(slots=True, eq=False)
class Entry:
    """Where a record lies, its bytes without head and padding, what it continues, its last use, idle time and class."""

    place: Place
    size: int
    parent: RecordId | None
    used_at: float
    idle_s: float
    retention: RetentionClass


class SegmentIndex:
    """All times are unix seconds. What a record is worth is the tier's own to learn: it sees other uses than DRAM."""

    def __init__(self, capacity_bytes: int, retention: Retention = BY_CLASS, budgets: Budgets | None = None) -> None:
        """budgets: of what may be promised; by default nothing."""
        self._retention = retention
        self.resize(capacity_bytes)
        self._entries: dict[RecordId, Entry] = {}
        self._members: dict[int, set[RecordId]] = {}
        self._sizes: dict[int, int] = {}
        self._wanted: dict[int, int] = {}  # bytes of each segment
        self._copies: dict[int, dict[Place, RecordId]] = defaultdict(dict)  # by segment; not what the index leads to
        self._order: EvictionOrder[RecordId] = EvictionOrder(sample, budgets or Budgets(0, 0))
        self._unwanted: list[tuple[float, bytes, RecordId]] = []  # heap by when each expires
        self.used = 0  # bytes of all segments
        self.wanted = 0  # bytes of all records in the order

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def ids(self) -> KeysView[RecordId]:
        return self._entries.keys()

    @property
    def segments(self) -> KeysView[int]:
        return self._sizes.keys()

    def resize(self, capacity_bytes: int) -> None:
        """Of all segments."""
        self._budget = round(_WANTED_SHARE * capacity_bytes)

    def get(self, record: RecordId) -> Entry | None:
        return self._entries.get(record)

    def add(self, stored: Stored, place: Place, now: float, arrival: Arrival) -> None:
        """Takes in a record that was written just now."""
        if self._placed(stored, place, now):
            self._order.add(stored.id, stored.parent_id, now, arrival, self._kept_s(stored))
            self._count(place, 1)

    def restore(self, stored: Stored, place: Place, now: float) -> None:
        """Takes in a record that a former run wrote. The newest of several copies wins."""
        used_at = min(stored.stored_at, now)
        if self._placed(stored, place, used_at):
            self._order.restore(stored.id, stored.parent_id, used_at, now, self._kept_s(stored))
            self._count(place, 1)

    def move(self, record: RecordId, place: Place) -> None:
        """A record lies elsewhere now, if it is still here."""
        self.grow(place.segment, place.offset + place.nbytes)
        entry = self._entries.get(record)
        if entry is None:
            self.copied(record, place)
            return
        self.copied(record, entry.place)
        if record in self._order:
            self._count(entry.place, -1)
            self._count(place, 1)
        self._members[entry.place.segment].discard(record)
        self._members.setdefault(place.segment, set()).add(record)
        entry.place = place

    def grow(self, segment: int, nbytes: int) -> None:
        """A segment is at least so long."""
        known = self._sizes.get(segment, 0)
        self._sizes[segment] = max(known, nbytes)
        self.used += max(nbytes - known, 0)

    def touch(self, prefix: Iterable[RecordId], now: float) -> None:
        """A prefix was used, from its start; what of it is not here is passed over."""
        wanted = []
        for record in prefix:
            entry = self._entries.get(record)
            if entry is None:
                continue
            entry.used_at = now
            if record in self._order:
                wanted.append(record)
            else:
                self._order.add(record, entry.parent, now, ALONE, entry.idle_s)
                self._count(entry.place, 1)
        self._order.touch(wanted, now)

    def forget(self, record: RecordId, now: float) -> None:
        """Its bytes go with their segment."""
        if record in self._entries:
            self._unwant(record, now)
            place = self._entries.pop(record).place
            self._members[place.segment].discard(record)
            self.copied(record, place)

    def copied(self, record: RecordId, place: Place) -> None:
        """A copy of a record lies, or may lie, where the index does not lead to."""
        self.grow(place.segment, place.offset + place.nbytes)
        self._copies[place.segment][place] = record

    def copies(self, records: Collection[RecordId]) -> list[Place]:
        """Wherever these records lie, the copies that a start would find included."""
        wanted = set(records)
        places = [entry.place for record in wanted if (entry := self._entries.get(record)) is not None]
        return places + [at for one in self._copies.values() for at, record in one.items() if record in wanted]

    def erased(self, places: Iterable[Place]) -> None:
        """Nothing lies there any more."""
        for place in places:
            self._copies[place.segment].pop(place, None)

    def promise(self, record: RecordId, owner: Owner, keep_s: float, now: float) -> bool:
        """Prefers others for leaving for `keep_s` after each use, within the budgets; False for what is not wanted.
        As all that is learned here, a restart forgets it."""
        if record not in self._order:
            return False
        return self._order.promise(record, owner, self._entries[record].size, keep_s, now)

    def trim(self, now: float) -> None:
        """Lets go of what is worth least until the rest is within its budget, or of so much that others must run."""
        for _ in range(_TRIMMED):
            coldest = self._order.coldest(now, lambda record: True) if self.wanted > self._budget else None
            if coldest is None:
                return
            entry = self._entries[coldest]
            heapq.heappush(self._unwanted, (entry.used_at + entry.idle_s, coldest.key, coldest))
            self._unwant(coldest, now)

    def expire(self, now: float) -> list[RecordId]:
        """Forgets what nobody used for the time of its class, and tells what that was."""
        left: list[RecordId] = []
        while found := self._order.expired(now):
            for record in found:
                self.forget(record, now)
            left += found
        while self._unwanted and self._unwanted[0][0] <= now:
            _, _, record = heapq.heappop(self._unwanted)
            if record in self._entries and record not in self._order:
                self.forget(record, now)
                left.append(record)
        return left

    def victim(self, writing: Collection[int]) -> int | None:
        """The segment of which least is wanted, of several an empty or the oldest one; None if all are written to."""

        def loss(number: int) -> tuple[int, bool, int]:
            return self._wanted.get(number, 0), not self.is_empty(number), number

        return min((number for number in self._sizes if number not in writing), key=loss, default=None)

    def is_empty(self, segment: int) -> bool:
        """Whether nothing of a segment is here any more."""
        return not self._members.get(segment)

    def survivors(self, segment: int, share: float, now: float) -> list[tuple[Place, float]]:
        """What of a segment is wanted, in the order it lies in, each with its last use: at most a share of its bytes,
        what is promised first, then what is worth most."""

        def rank(record: RecordId) -> tuple[bool, float, bytes]:
            return self._order.promise_of(record, now) is None, -self._order.worth(record, now), record.key

        room = share * self._sizes[segment]
        wanted = [record for record in self._members.get(segment, ()) if record in self._order]
        kept: list[Entry] = []
        for record in sorted(wanted, key=rank):
            entry = self._entries[record]
            room -= entry.place.nbytes
            if room < 0:
                break
            kept.append(entry)
        return [(entry.place, entry.used_at) for entry in sorted(kept, key=lambda entry: entry.place)]

    def remove(self, segment: int, now: float) -> list[RecordId]:
        """Forgets a segment and what is in it, and tells what that was."""
        gone = list(self._members.get(segment, ()))
        for record in gone:
            self.forget(record, now)
        self._members.pop(segment, None)
        self._wanted.pop(segment, None)
        self._copies.pop(segment, None)
        self.used -= self._sizes.pop(segment)
        return gone

    def _kept_s(self, stored: Stored) -> float:
        return self._retention.of(stored.retention, stored.id.kind is RecordKind.ANCHOR)

    def _placed(self, stored: Stored, place: Place, used_at: float) -> bool:
        """Whether a record is new; where it is not, it lies at the newer place."""
        self.grow(place.segment, place.offset + place.nbytes)
        known = self._entries.get(stored.id)
        if known is not None:
            if known.place < place:
                self.move(stored.id, place)
            elif known.place != place:
                self.copied(stored.id, place)
            return False
        kept_s = self._kept_s(stored)
        self._entries[stored.id] = Entry(place, stored.size, stored.parent_id, used_at, kept_s, stored.retention)
        self._members.setdefault(place.segment, set()).add(stored.id)
        return True

    def _unwant(self, record: RecordId, now: float) -> None:
        if record in self._order:
            self._order.remove(record, now)
            self._count(self._entries[record].place, -1)

    def _count(self, place: Place, sign: int) -> None:
        self._wanted[place.segment] = self._wanted.get(place.segment, 0) + sign * place.nbytes
        self.wanted += sign * place.nbytes
