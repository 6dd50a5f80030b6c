"""Push: moves one prompt's KV from the pool to decode while the rest is computed. Decides nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from engine.cache.pool import CachePool
from engine.errors import UnknownRequest
from engine.layout import GroupKind
from engine.requests import HeldKV
from fabric.kvlink import Region
from fabric.kvlink.outgoing import Leave, Outgoing, Piece, Pieces, Sender
from fabric.kvlink.verify import digest
from fabric.records import Extent
from services.prefill.ask import TicketGrant
from services.prefill.marks import Mark, Marks
from services.prefill.telemetry import PrefillMetrics
from services.worker.geometry import Handoff, Place

# Below this a thread costs more than the digests; a device is always waited for in one.
_INLINE_BYTES = 2 << 20
# Signs of life within one lease: decode extends it by less than its whole length each time.
_SIGNS_PER_LEASE = 6
_LEAST_HEARTBEAT_S = 0.005  # whatever lease a ticket names


@dataclass(frozen=True, slots=True)
class PoolSource:
    """The engine's cache memory as the link knows it: registered once, read by every push.

    `slots` is None for a model without window groups: then there is no such memory.
    """

    pool: CachePool
    blocks: Region
    slots: Region | None

    def seal(self, places: Sequence[Place], kv: HeldKV) -> Pieces:
        """The extents of `places` in the host's memory, with digests of the bytes as they are now."""
        if self.pool.is_apart:
            windows = {group.name for group in self.pool.layout.windows}
            rows = {kv.block_table[place.block] for place in places if place.group not in windows}
            self.pool.fetch(rows, {kv.slot for place in places if place.group in windows})
        return Pieces.pack([self._sealed(place, kv) for place in places])

    def _sealed(self, place: Place, kv: HeldKV) -> Piece:
        if self.pool.layout.group(place.group).kind is GroupKind.GLOBAL:
            region, row = self.blocks, kv.block_table[place.block]
        elif self.slots is not None:
            region, row = self.slots, kv.slot
        else:
            raise RuntimeError(f"window group {place.group} in a pool without slots")
        start, size = self.pool.row_of(place.group, row)
        seal = digest(region.memory[start : start + size])
        return Piece(place.group, place.block, place.valid_entries, region, start, size, seal)


class _Preempted(Exception):
    """The blocks that a mark was about are gone."""


class Pusher:
    """Pushes one prompt into one landing. `held` reads where its KV is now; the blocks must stay until `run` ends, and
    what it left as well."""

    def __init__(
        self,
        sender: Sender,
        source: PoolSource,
        ticket: TicketGrant,
        handoff: Handoff,
        held: Callable[[], HeldKV],
        heartbeat_s: float,
        metrics: PrefillMetrics,
        leave: Leave,
    ) -> None:
        """held raises UnknownRequest while the prompt has no memory. heartbeat_s: seconds between two signs of life
        while there is nothing to push, at most. leave: takes what still reads the blocks when `run` is over."""
        self._sender, self._source, self._ticket, self._handoff = sender, source, ticket, handoff
        self._held, self._metrics, self._leave = held, metrics, leave
        self._sealing: asyncio.Future[Pieces] | None = None
        self._heartbeat_s = max(_LEAST_HEARTBEAT_S, min(heartbeat_s, ticket.lease_s / _SIGNS_PER_LEASE))
        self._sealed: list[Extent] = []
        self._next_block = handoff.first_block

    @property
    def pushed_tokens(self) -> int:
        """Tokens whose blocks are with decode."""
        return min(self._next_block * self._handoff.layout.block_tokens, self._handoff.tokens)

    async def run(self, marks: Marks) -> tuple[Extent, ...]:
        """Follows the marks to the end of the prompt; returns everything that was pushed, sealed.

        However it ends, decode is told as much as is known of what may still be written; it waits for no write then.

        Raises:
            ServiceError: a push failed or took too long, or decode refused what came. The transfer is then over.
        """
        try:
            await self._follow_all(marks)
        finally:
            if self._sealing is not None and not self._sealing.done():
                self._leave(_ended(self._sealing))
        return tuple(self._sealed)

    async def _follow_all(self, marks: Marks) -> None:
        size = self._handoff.landing_bytes
        async with self._sender.transfer(self._ticket.landing, size, self._leave) as outgoing:
            seen, generation, complete = Mark(generation=-1), 0, False
            while not complete:
                mark = await marks.after(seen, self._heartbeat_s)
                if mark is None:
                    await outgoing.alive()
                    continue
                seen = mark
                if mark.generation != generation:
                    self._sealed, self._next_block, generation = [], self._handoff.first_block, mark.generation
                complete = await self._follow(outgoing, mark)

    async def _follow(self, outgoing: Outgoing, mark: Mark) -> bool:
        """Pushes what the mark made final; whether that was all."""
        end = mark.tokens // self._handoff.layout.block_tokens
        if mark.complete:
            await self._push(outgoing, self._handoff.blocks, windows=mark.windows, last=True)
        elif end > self._next_block:
            with suppress(_Preempted):  # the mark that says so comes with the engine's next events
                await self._push(outgoing, end, windows=False, last=False)
        return mark.complete

    async def _push(self, outgoing: Outgoing, end: int, windows: bool, last: bool) -> None:
        """Seals and sends blocks up to `end`, and with the last of them the window groups, if they are handed over."""
        kv, handoff = self._kv(end), self._handoff
        places = [place for block in range(self._next_block, end) for place in handoff.block_places(block)]
        places += handoff.window_places() if windows else ()
        total = sum(place.size for place in places)
        if total <= _INLINE_BYTES and not self._source.pool.is_apart:
            pieces = self._source.seal(places, kv)
        else:
            self._sealing = asyncio.ensure_future(asyncio.to_thread(self._source.seal, places, kv))
            pieces = await asyncio.shield(self._sealing)
        with self._metrics.transfer(total):
            await outgoing.send(pieces, last=last)
        digests = pieces.extents.table["digest"].tolist()
        self._sealed += [place.sealed(seal) for place, seal in zip(places, digests, strict=True)]
        self._next_block = end

    def _kv(self, end: int) -> HeldKV:
        """Where blocks up to `end` are. Raises _Preempted where the engine took them before we heard of it."""
        try:
            kv = self._held()
        except UnknownRequest as error:
            raise _Preempted from error
        if len(kv.block_table) < end:
            raise _Preempted
        return kv


async def _ended(work: asyncio.Future[Pieces]) -> None:
    await asyncio.wait([work])
