"""Push: moves one prompt's KV from the pool into decode's landing while the rest is computed. Decides nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from engine.cache.pool import CachePool
from engine.requests import HeldKV
from fabric.errors import DeadlineExceeded, ServiceError
from fabric.kvlink import Link, Region, Write, plan
from fabric.kvlink.verify import digest
from fabric.records import Extent
from fabric.telemetry import logs
from services.prefill.ask import TicketGrant
from services.prefill.marks import Mark, Marks
from services.prefill.telemetry import PrefillMetrics
from services.worker.extents import extent_view
from services.worker.geometry import Handoff, Offsets, Place
from services.worker.notices import HandoffNotice
from services.worker.together import settled

_log = logs.get("push")
# Below this a thread costs more than the digests.
_INLINE_BYTES = 2 << 20
# Signs of life within one lease: decode extends it by less than its whole length each time.
_SIGNS_PER_LEASE = 6


@dataclass(frozen=True, slots=True)
class PoolSource:
    """The engine's cache memory as the link knows it: registered once, read by every push.

    `slots` is None for a model without window groups: then there is no such memory.
    """

    pool: CachePool
    blocks: Region
    slots: Region | None

    def seal(self, places: Iterable[Place], kv: HeldKV) -> list[Extent]:
        """The extents of `places` with digests of the bytes as they are now."""
        return [place.sealed(digest(extent_view(self.pool, place.group, place.block, kv))) for place in places]


async def give_up(link: Link, ticket: TicketGrant, timeout_s: float, trailing: bool = False) -> None:
    """Tells decode that nothing (more) will be written for a ticket. Never raises: decode's own lease is behind it.

    trailing: but what was given up may still be on its way.
    """
    notice = HandoffNotice(ticket.id, last=not trailing, trailing=trailing).dump()
    try:
        await link.push(ticket.landing.address, [], notify=notice, timeout_s=timeout_s)
    except ServiceError as error:
        _log.info("decode was not told that the push ended", code=error.code)


@dataclass(frozen=True, slots=True)
class PushLimits:
    timeout_s: float  # of one push
    heartbeat_s: float  # between two signs of life while there is nothing to push


class Pusher:
    """Pushes one prompt into one landing. `held` reads where its KV is now; the blocks must stay until `run` ends."""

    def __init__(
        self,
        link: Link,
        source: PoolSource,
        ticket: TicketGrant,
        handoff: Handoff,
        held: Callable[[], HeldKV],
        limits: PushLimits,
        metrics: PrefillMetrics,
    ) -> None:
        self._link, self._source, self._ticket, self._handoff = link, source, ticket, handoff
        self._held, self._limits, self._metrics = held, limits, metrics
        self._heartbeat_s = min(limits.heartbeat_s, ticket.lease_s / _SIGNS_PER_LEASE)
        self._sealed: list[Extent] = []
        self._next_block = handoff.first_block
        self._finished = self._in_doubt = False

    @property
    def pushed_tokens(self) -> int:
        """Tokens whose blocks are in the landing."""
        return min(self._next_block * self._handoff.layout.block_tokens, self._handoff.tokens)

    async def run(self, marks: Marks) -> tuple[Extent, ...]:
        """Follows the marks to the end of the prompt; returns everything that was pushed, sealed.

        Raises:
            ServiceError: a push failed or took too long. The landing is then spoilt.
        """
        seen = Mark(generation=-1)
        generation = 0
        while not self._finished:
            mark = await marks.after(seen, self._heartbeat_s)
            if mark is None:
                await self._say(last=False)
                continue
            seen = mark
            if mark.generation != generation:
                self._sealed, self._next_block, generation = [], self._handoff.first_block, mark.generation
            await self._follow(mark)
        return tuple(self._sealed)

    async def close(self) -> None:
        """Tells decode that nothing more will be written, unless the last push did. Never raises.

        Where a push ran out of time it says no more than it knows: the rest of that one may still be on its way.
        """
        if not self._finished:
            self._finished = True
            await give_up(self._link, self._ticket, self._limits.timeout_s, self._in_doubt)

    async def _follow(self, mark: Mark) -> None:
        end = mark.tokens // self._handoff.layout.block_tokens
        if mark.complete:
            await self._push(self._handoff.blocks, windows=mark.windows, last=True)
            self._finished = True
        elif end > self._next_block:
            await self._push(end, windows=False)

    async def _push(self, end: int, windows: bool, last: bool = False) -> None:
        """Seals and writes blocks up to `end`, and with the last of them the window groups, if they are handed over."""
        kv, first, layout = self._held(), self._next_block, self._handoff.layout
        places = [place for block in range(first, end) for place in self._handoff.block_places(block)]
        places += self._handoff.window_places() if windows else ()
        table = np.asarray(kv.block_table[first:end], dtype=np.int64)
        writes = [self._write(self._source.blocks, table, self._handoff.block_offsets(first, end), layout.block_bytes)]
        if windows and self._source.slots is not None:
            slot, offset = np.array([kv.slot]), np.array([self._handoff.window_offset])
            writes.append(self._write(self._source.slots, slot, offset, layout.window_bytes))
        if sum(place.size for place in places) <= _INLINE_BYTES:
            sealed = self._source.seal(places, kv)
        else:
            sealed = await asyncio.to_thread(self._source.seal, places, kv)
        with self._metrics.transfer(sum(place.size for place in places)):
            await self._send([write for write in writes if len(write.sizes)], last)
        self._sealed += sealed
        self._next_block = end

    def _write(self, region: Region, rows: Offsets, offsets: Offsets, row_bytes: int) -> Write:
        """Rows of pool memory to places in the landing: one descriptor each, whatever the number of groups."""
        sizes = np.full(len(rows), row_bytes, dtype=np.int64)
        return plan.write_to(self._ticket.landing, region, rows * row_bytes, offsets, sizes)

    async def _say(self, last: bool) -> None:
        await self._send([], last)

    async def _send(self, writes: list[Write], last: bool) -> None:
        await settled(self._write_all(writes, HandoffNotice(self._ticket.id, last).dump()))

    async def _write_all(self, writes: list[Write], notify: bytes) -> None:
        address, timeout_s = self._ticket.landing.address, self._limits.timeout_s
        try:
            await self._link.push(address, writes, notify=notify, timeout_s=timeout_s)
        except DeadlineExceeded:
            self._in_doubt = self._in_doubt or bool(writes)
            raise
