"""Prefetch: brings prefixes up from the disk before they are asked for. Bounded and soft; nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.kvstore.records import BlockName, Identity, RecordId, RecordKind
from services.kvstore.tiers import Tiers

MAX_WAITING = 64  # prefixes; a hint beyond them is dropped
_PIECE = 32  # blocks of one read: who is served meanwhile takes turns with it


@dataclass(frozen=True, slots=True)
class Rising:
    """Leading blocks that are held and of use, and how many of them are being brought up."""

    held: int
    rising: int


@dataclass(slots=True)
class PrefetchCounts:
    """Hints taken and dropped since the start, and blocks that were on disk alone and are in memory now."""

    taken: int = 0
    dropped: int = 0
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class _Prefix:
    names: Sequence[BlockName]
    identity: Identity
    anchor: bool


class Prefetcher:
    """Raises one prefix after the other, each up to `most_bytes`: a hint must not sweep memory clean."""

    def __init__(self, tiers: Tiers, most_bytes: int) -> None:
        self._tiers, self._most_bytes = tiers, most_bytes
        self._waiting: asyncio.Queue[_Prefix] = asyncio.Queue(MAX_WAITING)
        self.counts = PrefetchCounts()

    def ask(self, names: Sequence[BlockName], identity: Identity, anchor: bool) -> Rising:
        """Takes a hint: with `anchor` what is held up to the last anchor comes up, otherwise every leading block."""
        held = self._tiers.lookup(names, identity)
        usable = held.anchored if anchor else held.blocks
        fitting, below = self._fitting(names[:usable], identity)
        anchor = anchor and fitting == usable > 0
        if not below and not (anchor and self._lacks(RecordKind.ANCHOR, names[usable - 1], identity)):
            return Rising(usable, 0)
        if self._waiting.full():
            self.counts.dropped += 1
            return Rising(usable, 0)
        self.counts.taken += 1
        self._waiting.put_nowait(_Prefix(names[:fitting], identity, anchor))
        return Rising(usable, below)

    async def run(self) -> None:
        """Raises what was asked for until cancelled."""
        while True:
            prefix = await self._waiting.get()
            for start in range(0, len(prefix.names), _PIECE):
                await self._raise(prefix, start, min(start + _PIECE, len(prefix.names)))
            self._waiting.task_done()

    async def settled(self) -> None:
        """Returns once nothing waits or rises."""
        await self._waiting.join()

    async def _raise(self, prefix: _Prefix, start: int, end: int) -> None:
        names, last = prefix.names[start:end], end == len(prefix.names)
        before = self._below(names, prefix.identity)
        if before or (last and prefix.anchor):
            await self._tiers.raise_(names, prefix.identity, anchor=last and prefix.anchor)
            self.counts.blocks += before - self._below(names, prefix.identity)

    def _fitting(self, names: Sequence[BlockName], identity: Identity) -> tuple[int, int]:
        """How many leading blocks can be brought up within the bound, and how many of them are below."""
        size = below = 0
        for index, name in enumerate(names):
            if self._lacks(RecordKind.BLOCK, name, identity):
                size += self._size(name)
                if size > self._most_bytes:
                    return index, below
                below += 1
        return len(names), below

    def _below(self, names: Sequence[BlockName], identity: Identity) -> int:
        return sum(self._lacks(RecordKind.BLOCK, name, identity) for name in names)

    def _lacks(self, kind: RecordKind, name: BlockName, identity: Identity) -> bool:
        return self._tiers.dram.find(kind, name, identity) is None

    def _size(self, name: BlockName) -> int:
        nvme = self._tiers.nvme
        return (nvme.size_of(RecordId(RecordKind.BLOCK, name.key)) or 0) if nvme is not None else 0
