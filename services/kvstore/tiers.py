"""Tiers: DRAM over NVMe as one. Knows what is held and moves it up and down; knows no network and no index."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from services.kvstore.allowance import Allowance
from services.kvstore.nvme.format import Stored
from services.kvstore.nvme.jobs import Wanted
from services.kvstore.nvme.tier import NvmeTier
from services.kvstore.policy.budget import Owner
from services.kvstore.records import BlockName, Identity, Record, RecordId, RecordKind
from services.kvstore.tier import DramTier, Held

_SWEEP_S = 60.0
_READ_SHARES = 2  # all reads together keep one of so many shares of DRAM in place
_SAME_USE_S = 30.0  # a request reads a prefix, and offers it once it was computed and again as it is decoded
# Records, by the name that asked for each.
_Missing = list[tuple[RecordId, BlockName, int]]


class Tiers:
    """`nvme` is None where there is no directory: then DRAM is all there is. `now` tells unix seconds."""

    def __init__(self, dram: DramTier, nvme: NvmeTier | None, now: Callable[[], float]) -> None:
        self.dram, self.nvme, self._now = dram, nvme, now
        self.allowance = Allowance(dram.capacity // _READ_SHARES)
        if nvme is not None:
            dram.lies_below = self._lies_below
            nvme.promise_of = dram.promise_of

    def has(self, record: RecordId) -> bool:
        """Whether a record of this name is in any tier."""
        return self.dram.by_id(record) is not None or self._below(record) is not None

    def lookup(self, names: Sequence[BlockName], identity: Identity, anchors: bool = True) -> Held:
        """Leading blocks held, and up to which anchor, if `anchors` are asked for. What is on disk is taken at its key
        until it is read."""
        blocks = anchored = 0
        for name in names:
            if not self._holds(RecordKind.BLOCK, name, identity):
                break
            blocks += 1
            if anchors and self._holds(RecordKind.ANCHOR, name, identity):
                anchored = blocks
        return Held(blocks, anchored)

    def size_of(self, kind: RecordKind, name: BlockName) -> int | None:
        """Bytes of a record, of whatever tokens, in any tier; None where it is not here."""
        held = self.dram.by_id(RecordId(kind, name.key))
        return held.size if held is not None else self._below(RecordId(kind, name.key))

    def only_warm(self, names: Sequence[BlockName], identity: Identity, anchor: bool) -> list[Record]:
        """What of the leading names is in DRAM, while others are below, and not there. No use of it."""
        if self.nvme is None:  # nothing comes up that could take its room
            return []
        return [record for record in self._missing(names, identity, anchor)[1] if self._below(record.id) is None]

    async def raise_(self, names: Sequence[BlockName], identity: Identity, anchor: bool) -> set[RecordId]:
        """Brings what is asked for up to DRAM, as far as it is here and there is room, verified on the way.

        The anchor of the last block only where all blocks are here: without them it is of no use. Returns what came up.
        """
        if self.nvme is None:
            return set()
        missing, here = self._missing(names, identity, anchor)
        if not missing:
            return set()
        with self.dram.pinned(here):
            offsets = self._room([size for _, _, size in missing])
            wanted = [
                Wanted(record, size, self.dram.room(offset, size))
                for (record, _, size), offset in zip(missing, offsets, strict=False)
            ]
            try:
                read = await self.nvme.fetch(wanted)
            except BaseException:
                for offset in offsets:
                    self.dram.give(offset)
                raise
            came = zip(missing, offsets, read, strict=False)
            return {record for (record, name, _), at, stored in came if self._admit(name, identity, at, stored)}

    def collect(self, names: Sequence[BlockName], identity: Identity, anchor: bool) -> list[Record]:
        """Leading blocks of `names` that are in DRAM and, where `anchor` and all are, the last one's anchor."""
        return self.dram.collect(names, identity, anchor)

    def use(self, records: Sequence[Record]) -> None:
        """What `collect` found is read: it becomes young in both tiers. What is not below, for the disk had no time for
        it, is offered to it again."""
        here = self.dram.use(records)
        if self.nvme is not None:
            self.nvme.touch(record.id for record in here)
            for record in here:
                self.keep(record)

    def refresh(self, prefix: Sequence[RecordId]) -> None:
        """A prefix was used where this store did not see it, in a worker's own memory: what follows it is offered.

        What was used a moment ago is passed over: the same request read it, or offered it already.
        """
        self.dram.refresh(prefix, _SAME_USE_S)
        if self.nvme is not None:
            self.nvme.refresh(prefix, _SAME_USE_S)

    def retain(self, keys: Sequence[bytes], keep_s: float, budget_bytes: int, owner: Owner) -> tuple[int, int]:
        """Has others leave first, in every tier that has a record and within the budgets of each. Returns how many
        records are retained in any, and their bytes."""
        kept = self.dram.retain(keys, keep_s, budget_bytes, owner)
        if self.nvme is not None:
            kept = self.nvme.retain(keys, keep_s, budget_bytes, owner) | kept
        return len(kept), sum(kept.values())

    def keep(self, record: Record) -> None:
        """Writes a record of DRAM behind, to the disk, unless it is there; until then its bytes stay.

        Raises:
            ValueError: it is not in DRAM (any more): its bytes may be another's.
        """
        if self.dram.by_id(record.id) is not record:
            raise ValueError(f"{record.id.kind} record is not in DRAM")
        if self.nvme is None or not self.nvme.wants(record.id):
            return
        with ExitStack() as held:
            held.enter_context(self.dram.pinned([record]))
            payload = self.dram.memory[record.offset : record.offset + record.size]
            arrival = self.dram.arrival(record.id)
            self.nvme.offer(Stored.of(record, self._now()), payload, held.pop_all().close, arrival)

    def _missing(self, names: Sequence[BlockName], identity: Identity, anchor: bool) -> tuple[_Missing, list[Record]]:
        """What of the leading names is on disk alone, and what is in DRAM."""
        missing: _Missing = []
        here: list[Record] = []
        last = (RecordKind.ANCHOR,) if anchor else ()
        for index, name in enumerate(names):
            for kind in (RecordKind.BLOCK, *(last if index == len(names) - 1 else ())):
                record, size = self.dram.find(kind, name, identity), self._below(RecordId(kind, name.key))
                if record is not None:
                    here.append(record)
                elif size is not None:
                    missing.append((RecordId(kind, name.key), name, size))
                else:
                    return missing, here
        return missing, here

    def _room(self, sizes: Sequence[int]) -> list[int]:
        """Places for as many leading records as DRAM can take."""
        offsets = []
        for size in sizes:
            offset = self.dram.take(size)
            if offset is None:
                break
            offsets.append(offset)
        return offsets

    def _admit(self, name: BlockName, identity: Identity, offset: int, stored: Stored | None) -> bool:
        record = stored.placed(offset) if stored is not None else None
        if record is None or not record.answers(name, identity):
            self.dram.give(offset)
            return False
        return self.dram.admit(record)

    async def run(self) -> None:
        """Lets go of what is idle in DRAM, be there a demand for its room or not, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.dram.drop_idle()

    def _lies_below(self, record: Record) -> bool:
        self.keep(record)
        return self._below(record.id) is not None

    def _holds(self, kind: RecordKind, name: BlockName, identity: Identity) -> bool:
        record = RecordId(kind, name.key)
        held = self.dram.by_id(record)
        return (held is not None and held.answers(name, identity)) or self._below(record) is not None

    def _below(self, record: RecordId) -> int | None:
        return self.nvme.size_of(record) if self.nvme is not None else None
