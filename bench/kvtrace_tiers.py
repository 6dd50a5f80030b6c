"""The store's own tiers behind the replay's cache interface: DRAM over segments, all of their code but the files.

Blocks are a few bytes here, and segments lists in memory: how many blocks fit is what counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Self

import numpy as np

from bench.kvtrace_requests import Request
from fabric.kvlink.verify import digest
from fabric.records import Extent
from services.kvstore.nvme.files import Bytes, Place, SegmentFiles, Stream
from services.kvstore.nvme.format import PAGE, Head, Stored
from services.kvstore.nvme.tier import NvmeTier
from services.kvstore.policy.retention import MOST_WARM_S, WarmWindow
from services.kvstore.policy.traits import Arrival
from services.kvstore.records import ROOT, BlockName, Identity, Record, RecordId, RecordKind
from services.kvstore.tier import DramTier
from services.kvstore.tiers import Tiers

BLOCK_BYTES = 64
SEGMENT_BLOCKS = 64  # as 64 MiB files of 1 MiB blocks
IDENTITY = Identity("replay", "replay")
_PAYLOAD = np.zeros(BLOCK_BYTES, np.uint8)
EXTENTS = (Extent("block", 0, 1, 0, BLOCK_BYTES, digest(_PAYLOAD)),)


class MemorySegments(SegmentFiles):
    """Segments that are lists: places and streams as in files, nothing on a disk."""

    def __init__(self) -> None:
        self.segment_bytes = SEGMENT_BLOCKS * PAGE
        self._lists: dict[int, list[tuple[Head, Bytes]]] = {}
        self._open: dict[Stream, int] = {}
        self._next = 1

    @property
    def numbers(self) -> list[int]:
        return sorted(self._lists)

    @property
    def writing(self) -> set[int]:
        return set(self._open.values())

    def append(self, stored: Stored, payload: Bytes, stream: Stream = Stream.NEW) -> Place:
        number = self._open.get(stream)
        if number is None or len(self._lists[number]) == SEGMENT_BLOCKS:
            number = self._open[stream] = self._next
            self._next += 1
            self._lists[number] = []
        records = self._lists[number]
        records.append((Head(stored, 0, PAGE), payload.copy()))
        return Place(number, PAGE * (len(records) - 1), PAGE)

    def sync(self) -> None:
        return

    def read(self, place: Place) -> tuple[Head, Bytes]:
        return self._lists[place.segment][place.offset // PAGE]

    def read_into(self, place: Place, target: Bytes) -> Head:
        head, payload = self.read(place)
        np.copyto(target, payload)
        return head

    def remove(self, number: int) -> None:
        del self._lists[number]

    def scan(self, number: int) -> Iterator[tuple[Place, Head] | None]:
        return iter(())

    def close(self) -> None:
        self._lists.clear()


@dataclass(slots=True)
class TierCounts:
    """Blocks of hits: all, and those that were in DRAM."""

    hit: int = 0
    warm: int = 0


class RealTiers:
    """A context: DRAM of `dram` blocks over a disk of `nvme` blocks."""

    def __init__(self, dram: int, nvme: int, asks_dram: bool = False) -> None:
        """asks_dram: what DRAM's admission refuses is not stored at all."""
        self.counts, self._asks_dram, self._now = TierCounts(), asks_dram, 0.0
        self.nvme = NvmeTier(MemorySegments(), nvme * PAGE, self._clock, dram * BLOCK_BYTES)
        self._dram = DramTier(dram * BLOCK_BYTES, self._clock, WarmWindow(MOST_WARM_S))
        self._tiers = Tiers(self._dram, self.nvme, self._clock)
        self._names: dict[int, BlockName] = {}
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        self._writer = self._runner.get_loop().create_task(self.nvme.run())
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.cancel()
        self._runner.close()

    def serve(self, request: Request) -> int:
        """As a worker does: look up, get, and put what is new."""
        self._now = request.time_s
        return self._runner.run(self._serve(request))

    async def _serve(self, request: Request) -> int:
        names = [self._name(block) for block in request.looked_up]
        found = self._tiers.lookup(names, IDENTITY).blocks
        warm = self._dram.lookup(names, IDENTITY).blocks
        await self._tiers.raise_(names[:found], IDENTITY, anchor=False)
        records = self._tiers.collect(names[:found], IDENTITY, anchor=False) if found else []
        self._tiers.use(records)
        hit = len(records)
        self.counts.hit, self.counts.warm = self.counts.hit + hit, self.counts.warm + min(warm, hit)
        self._put([self._name(block) for block in request.offered])
        await self.nvme.drained()
        return hit

    def _put(self, names: Sequence[BlockName]) -> None:
        ids = [RecordId(RecordKind.BLOCK, name.key) for name in names]
        held = next((at for at, record in enumerate(ids) if not self._tiers.has(record)), len(ids))
        new = [at for at in range(held, len(ids)) if not self._tiers.has(ids[at])]
        arrivals = {at: Arrival(len(new), held > 0, at == new[-1]) for at in new}
        if self._asks_dram:
            admitted = [self._dram.admits(ids[at], BLOCK_BYTES, arrivals[at]) for at in new]
            new = new if admitted and admitted[0] else []
        for at in new:
            place = self._dram.take(BLOCK_BYTES)
            if place is None:
                return
            parent = names[at - 1].key if at else ROOT
            record = Record(ids[at], IDENTITY, names[at].tokens, parent, place, BLOCK_BYTES, EXTENTS)
            self._dram.admit(record, arrivals[at])
            self._tiers.keep(record)

    def _name(self, block: int) -> BlockName:
        name = self._names.get(block)
        if name is None:
            name = self._names[block] = BlockName(blake2b(block.to_bytes(8), digest_size=32).digest(), b"")
        return name

    def _clock(self) -> float:
        return self._now
