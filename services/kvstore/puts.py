"""Puts: one writer's visit, from its offer to its commit. Knows what was granted; what is visible was verified."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from fabric.errors import DataLoss, InvalidArgument
from fabric.kvlink import plan
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.slabs import Writer
from fabric.kvlink.verify import Placement
from fabric.records import Extent, Landing
from services.kvstore.offers import Offer, RecordOffer, needed_by
from services.kvstore.policy.traits import Arrival
from services.kvstore.records import ROOT, Record, RecordId, RecordKind
from services.kvstore.tiers import Tiers


@dataclass(frozen=True, slots=True)
class Granted:
    """Which records of the offer are wanted, and where each one goes in the landing. No landing where none is.

    `other_instance` has the start of it, and what is new belongs there for now; empty where it belongs here.
    """

    wanted: tuple[int, ...]
    offsets: tuple[int, ...]
    landing: Landing | None
    other_instance: str = ""


@dataclass(frozen=True, slots=True)
class Committed:
    stored: tuple[Record, ...]
    rejected: int


class PutSession:
    """`grant`, then the writer writes, then `commit`; `close` at the end, whatever happened."""

    def __init__(self, tiers: Tiers, landings: LandingPool, offer: Offer, id_: str, most_bytes: int) -> None:
        self.offer, self.id, self._most_bytes = offer, id_, most_bytes
        self._tiers, self._tier, self._landings = tiers, tiers.dram, landings
        self._granted = Granted((), (), None)
        self._writer = Writer.FINISHED
        self._arrivals: dict[int, Arrival] = {}
        self._held = ExitStack()  # what this visit stored: what follows must not take its room
        self._lost: set[RecordId] = set()  # stand for something else here: what continues them is not taken

    def new_blocks(self) -> list[RecordOffer]:
        """What of the offer would be new here, anchors aside."""
        wanted = [self.offer.records[index] for index in self._wanted()]
        return [record for record in wanted if record.id.kind is RecordKind.BLOCK]

    def grant(self) -> Granted:
        """Chooses what is wanted and takes a landing for it.

        Raises:
            Exhausted: no landing memory now.
        """
        self._tiers.refresh([record.id for record in self.offer.records])
        wanted = self._admitted(self._wanted())
        sizes = np.array([self.offer.records[index].size for index in wanted], dtype=np.int64)
        if wanted:
            landing = self._landings.grant(self.id, int(sizes.sum()))
            self._granted = Granted(wanted, tuple(plan.lay_out(sizes).tolist()), landing)
            self._writer = Writer.UNKNOWN
        return self._granted

    async def commit(self, records: Sequence[Sequence[Extent]]) -> Committed:
        """Verifies the records on their way into the tier; one that is not as sealed is dropped, the others stay.

        Raises:
            InvalidArgument: another number of records than was granted.
        """
        granted = self._granted
        if len(records) != len(granted.wanted):
            raise InvalidArgument(
                f"{len(records)} records, {len(granted.wanted)} were granted",
                field="commit.records",
                fix="commit what was granted, in its order",
            )
        self._writer = Writer.FINISHED
        stored: list[Record] = []
        rejected = 0
        for index, offset, extents in zip(granted.wanted, granted.offsets, records, strict=True):
            try:
                record = await self._take(index, offset, extents)
            except DataLoss:
                rejected += 1
                continue
            stored += [record] if record is not None else []
        return Committed(tuple(stored), rejected)

    def close(self) -> None:
        """Gives the landing back, in doubt unless the writer committed, and lets go of what was stored."""
        if self._granted.landing is not None:
            self._landings.release(self.id, self._writer)
            self._granted = Granted((), (), None)
        self._held.close()

    def _wanted(self) -> tuple[int, ...]:
        return self.offer.wanted(self._tiers.has, self._is_foreign, self._most_bytes)

    def _is_foreign(self, record: RecordOffer) -> bool:
        here = self._tier.by_id(record.id)
        return here is not None and not here.answers(record.name, self.offer.identity)

    def _admitted(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """All of them or none, as the policy says of the first: a prefix without its anchor would be of little use.

        Over a disk everything is let in, on its way down.
        """
        continues = len(wanted) < len(self.offer.records) or self.offer.records[0].parent != ROOT
        self._arrivals = {index: Arrival(len(wanted), continues, index == wanted[-1]) for index in wanted}
        if self._tiers.nvme is not None:
            return wanted
        admitted = [self._admits(index) for index in wanted]
        return wanted if admitted and admitted[0] else ()

    def _admits(self, index: int) -> bool:
        record = self.offer.records[index]
        return self._tier.admits(record.id, record.size, self._arrivals[index])

    async def _take(self, index: int, offset: int, extents: Sequence[Extent]) -> Record | None:
        """Copies one record out of the landing into the tier; its digests are checked on the copy."""
        offer = self.offer.records[index]
        self.offer.require_places(offer, extents, offset)
        needs = needed_by(offer)
        if needs in self._lost:
            self._lost.add(offer.id)
            return None
        if self._granted.landing is None or (needs is not None and not self._tiers.has(needs)):
            return None
        place = self._tier.take(offer.size)
        if place is None:
            return None
        inside = tuple(replace(extent, block=0, offset=extent.offset - offset) for extent in extents)
        views = [self._tier.memory[place + extent.offset : place + extent.end] for extent in inside]
        placements = [Placement(extent, view) for extent, view in zip(extents, views, strict=True)]
        try:
            await self._landings.commit(self.id, placements)
        except BaseException:
            self._tier.give(place)
            raise
        retention = self.offer.owner.retention
        record = Record(
            offer.id, self.offer.identity, offer.name.tokens, offer.parent, place, offer.size, inside, retention
        )
        if not self._tier.admit(record, self._arrivals[index]):
            self._lost |= {offer.id} if self._is_foreign(offer) else set()  # another writer was faster
            return None
        self._held.enter_context(self._tier.pinned([record]))
        self._tiers.keep(record)
        return record
