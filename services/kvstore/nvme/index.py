"""Index of the segments: which record lies where, and what it is worth. Knows places, times, bytes; reads nothing."""

from __future__ import annotations

from collections.abc import Iterable, KeysView
from dataclasses import dataclass

from services.kvstore.eviction import EvictionOrder
from services.kvstore.nvme.files import Place
from services.kvstore.nvme.format import Stored
from services.kvstore.nvme.survivors import survivors
from services.kvstore.policy.budget import Budgets
from services.kvstore.policy.retention import KEEP_S
from services.kvstore.policy.traits import Arrival
from services.kvstore.records import RecordId, sample


@dataclass(slots=True)
class Entry:
    """Where a record lies, and its bytes without head and padding."""

    place: Place
    size: int


class SegmentIndex:
    """All times are unix seconds. What a record is worth is the tier's own to learn: it sees other uses than DRAM."""

    def __init__(self) -> None:
        self._entries: dict[RecordId, Entry] = {}
        self._members: dict[int, set[RecordId]] = {}
        self._sizes: dict[int, int] = {}
        self._order: EvictionOrder[RecordId] = EvictionOrder(sample, Budgets(0, 0))
        self.used = 0  # bytes of all segments

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def ids(self) -> KeysView[RecordId]:
        return self._entries.keys()

    @property
    def segments(self) -> list[int]:
        """Numbers, oldest first."""
        return sorted(self._sizes)

    def get(self, record: RecordId) -> Entry | None:
        return self._entries.get(record)

    def used_at(self, record: RecordId) -> float:
        """When a record that is here was used last."""
        return self._order.used_s(record)

    def add(self, stored: Stored, place: Place, now: float, arrival: Arrival) -> None:
        """Takes in a record that was written just now."""
        if self._placed(stored, place):
            self._order.add(stored.id, stored.parent_id, now, arrival, KEEP_S[stored.retention])

    def restore(self, stored: Stored, place: Place, now: float) -> None:
        """Takes in a record that a former run wrote. The newest of several copies wins."""
        if self._placed(stored, place):
            self._order.restore(stored.id, stored.parent_id, stored.stored_at, now, KEEP_S[stored.retention])

    def move(self, record: RecordId, place: Place) -> None:
        """A record that is still here lies elsewhere now."""
        self.grow(place.segment, place.offset + place.nbytes)
        entry = self._entries.get(record)
        if entry is not None:
            self._members[entry.place.segment].discard(record)
            self._members.setdefault(place.segment, set()).add(record)
            entry.place = place

    def grow(self, segment: int, nbytes: int) -> None:
        """A segment is at least so long."""
        more = max(nbytes - self._sizes.get(segment, 0), 0)
        self._sizes[segment] = self._sizes.get(segment, 0) + more
        self.used += more

    def touch(self, prefix: Iterable[RecordId], now: float) -> None:
        """A prefix was used, from its start; what of it is not here is passed over."""
        self._order.touch([record for record in prefix if record in self._entries], now)

    def forget(self, record: RecordId, now: float) -> None:
        """Its bytes go with their segment."""
        entry = self._entries.pop(record, None)
        if entry is not None:
            self._members[entry.place.segment].discard(record)
            self._order.remove(record, now)

    def expire(self, now: float) -> list[RecordId]:
        """Forgets what nobody used for the time of its class, and tells what that was."""
        left: list[RecordId] = []
        while found := self._order.expired(now):
            for record in found:
                self.forget(record, now)
            left += found
        return left

    def empty(self) -> list[int]:
        """Segments of which nothing is left."""
        return [number for number in self._sizes if not self._members.get(number)]

    def remove(self, segment: int, now: float) -> list[RecordId]:
        """Forgets a segment and what is in it, and tells what that was."""
        gone = list(self._members.get(segment, ()))
        for record in reversed(gone):
            self.forget(record, now)
        self._members.pop(segment, None)
        self.used -= self._sizes.pop(segment)
        return gone

    def survivors(self, segment: int, share: float, now: float) -> list[tuple[RecordId, Place]]:
        """What of a segment is worth writing anew, in the order it lies in, up to a share of its bytes."""
        places = {record: self._entries[record].place for record in self._members.get(segment, ())}
        members = sorted(places, key=lambda record: places[record].offset)
        sizes = [places[record].nbytes for record in members]
        kept = survivors(members, sizes, self._order, share * self._sizes[segment], now)
        return [(record, places[record]) for record in kept]

    def _placed(self, stored: Stored, place: Place) -> bool:
        """Whether a record is new; where it is not, it lies at the newer place."""
        self.grow(place.segment, place.offset + place.nbytes)
        known = self._entries.get(stored.id)
        if known is not None:
            if known.place < place:
                self.move(stored.id, place)
            return False
        self._entries[stored.id] = Entry(place, stored.size)
        self._members.setdefault(place.segment, set()).add(stored.id)
        return True
