"""Store: verified records in, verified records out. Joins the tier, the link, the landings and the index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import not_
from typing import Any

import numpy as np

from fabric.errors import DataLoss, Exhausted
from fabric.kvlink import Link
from fabric.kvlink.extents import Extents, Row
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.leftovers import Leftovers
from fabric.kvlink.link import Region
from fabric.kvlink.outgoing import Outgoing, Sender, SendLimits
from fabric.kvlink.pieces import Pieces
from fabric.kvlink.slabs import Writer
from fabric.records import Extent, Landing
from services.kvstore.announcer import Announcer
from services.kvstore.fill import Filling
from services.kvstore.hints import Hints
from services.kvstore.index import Tier
from services.kvstore.offers import Offer, needed_by
from services.kvstore.policy.budget import NOBODY, Owner
from services.kvstore.prefetch import Prefetcher, Rising
from services.kvstore.puts import Committed, Granted, PutSession
from services.kvstore.records import BlockName, Identity, Record, RecordId, RecordKind
from services.kvstore.streaming import stream
from services.kvstore.telemetry import StoreMetrics
from services.kvstore.tier import Held
from services.kvstore.tiers import Tiers
from services.worker.notices import HandoffNotice
from services.worker.together import settled

_OPENING_BYTES = 8 << 20  # of a read, announced before the rest is looked for: that takes less time than to copy these
_SLACK_S = 1.0  # for what is left of a read, beside its last write and the word that it was the last


@dataclass(frozen=True, slots=True)
class StoreLimits:
    max_puts: int
    put_bytes: int  # most that one writer is granted
    push_timeout_s: float


@dataclass(frozen=True, slots=True)
class Lookup:
    held: Held
    other_instance: str
    other_blocks: int


@dataclass(frozen=True, slots=True)
class Served:
    """What Get brought."""

    blocks: int
    anchor: bool


class Store:
    """Everything this instance does with records, one asyncio task at a time per record."""

    def __init__(
        self,
        tiers: Tiers,
        link: Link,
        landings: LandingPool,
        hints: Hints,
        announcer: Announcer,
        filling: Filling,
        prefetcher: Prefetcher,
        limits: StoreLimits,
        mint: Callable[[], str],
        metrics: StoreMetrics,
    ) -> None:
        self.tiers, self.tier, self._link, self._landings, self._hints = tiers, tiers.dram, link, landings, hints
        self._announcer, self._filling, self._prefetcher = announcer, filling, prefetcher
        self._limits, self._metrics = limits, metrics
        self._region = link.register(tiers.dram.memory)
        self._sender = Sender(link, SendLimits(timeout_s=limits.push_timeout_s))
        self.leftovers = Leftovers(2 * limits.push_timeout_s + _SLACK_S)  # of reads whose calls are over
        self._mint = mint
        self._awaited: set[str] = set()
        announcer.where, announcer.held = self._where, self._held
        tiers.dram.evicted = lambda record: self._changed([record.id])
        if tiers.nvme is not None:
            tiers.nvme.found = tiers.nvme.left = self._changed

    async def follow(self) -> None:
        """Takes credits of readers, and frees landings of writers that left without a commit, once they are done."""
        async for notice in self._link.notices():
            told = None if self._sender.noticed(notice) else HandoffNotice.load(notice.payload)
            if told is not None and told.last and told.handoff_id not in self._awaited:
                self._landings.release(told.handoff_id, Writer.FINISHED)

    async def lookup(self, names: Sequence[BlockName], identity: Identity, anchor: bool) -> Lookup:
        """How far a prefix is held here, and who holds what follows. With `anchor` it is of use up to the last one."""
        held = self.tiers.lookup(names, identity)
        usable = held.anchored if anchor else held.blocks
        if usable:
            self._metrics.hit(usable)
        if usable < len(names):
            self._metrics.miss("no_anchor" if held.blocks > usable else "absent")
        other, blocks = await self._hints.elsewhere([name.key for name in names[held.blocks :]])
        return Lookup(held, other, blocks)

    async def prefetch(self, names: Sequence[BlockName], identity: Identity, anchor: bool) -> tuple[Rising, str]:
        """Has a prefix brought up to DRAM, some time. Also names who else holds what follows it, if somebody does."""
        rising = self._prefetcher.ask(names, identity, anchor)
        other, _ = await self._hints.elsewhere([name.key for name in names[rising.held :]])
        return rising, other

    async def get(
        self,
        names: Sequence[BlockName],
        first_block: int,
        anchor: bool,
        identity: Identity,
        landing: Landing,
        tell: Callable[[Row], object],
    ) -> Served:
        """Writes the records into the landing, chunk by chunk, from DRAM while what follows still comes from the disk.

        What lacks its start, or the anchor at its end, is not begun. What is gone on the way, or comes up damaged, ends
        it there: the last chunk says so, and the answer what there was. However it ends, the reader is told that no
        more will be written. `tell` hears of every extent that was sent, in order, while the reader copies; offsets
        count from the first one's start.

        It returns while one that is known to read this memory where it is still does so, and it ends at once where it
        is cancelled. What is left of it then is with `leftovers`, and keeps its bytes in place.

        Raises:
            InvalidArgument: the landing is smaller than an extent.
            DataLoss: the reader found that bytes in DRAM are not as they were sealed: these records are forgotten.
            ServiceError: a write failed, or the reader refused what came.
        """
        sent = _Sent(self._region, first_block, tell)

        def leave(work: Coroutine[Any, Any, None]) -> None:
            self.leftovers.keep(landing.id, self._left(work, sent))

        try:
            # What is read is let go of last, when it is known what the transfer left.
            async with AsyncExitStack() as reading, self._sender.transfer(landing, leave=leave) as outgoing:
                return await self._serve(outgoing, names, anchor, identity, sent, reading)
        except DataLoss:
            await self._drop_damaged(sent.records)
            raise

    async def _left(self, work: Coroutine[Any, Any, None], sent: _Sent) -> None:
        """What is left of a transfer whose call is over."""
        try:
            await work
        except DataLoss:
            await self._drop_damaged(sent.records)
            raise

    async def _serve(
        self,
        outgoing: Outgoing,
        names: Sequence[BlockName],
        anchor: bool,
        identity: Identity,
        sent: _Sent,
        reading: AsyncExitStack,
    ) -> Served:
        if not self._has_start(names, identity, anchor):
            self._metrics.miss("left")
            return Served(0, anchor=False)
        let_go = partial(self.leftovers.after, outgoing.owner)
        opening = _OPENING_BYTES if outgoing.lends_ahead(self._region) else 0
        found = stream(self.tiers, names, identity, anchor, let_go=let_go, opening_bytes=opening)
        async for part in await reading.enter_async_context(aclosing(found)):
            pieces = sent.place(part.records)
            if part.opens:
                await outgoing.begin(pieces)
                continue
            done = not part.whole or sent.blocks == len(names)
            if sent.blocks:
                asyncio.get_running_loop().call_soon(sent.tell_all)  # while the reader copies
                await outgoing.send(pieces, last=done, early=True)
            if done:
                break  # the bytes of this part may be needed still
        if outgoing.refused is not None and not outgoing.left_early:
            raise outgoing.refused
        if not sent.blocks or (anchor and not sent.anchor):
            self._metrics.miss("left")
        self._announcer.changed([name.key for name in names[: sent.blocks + 1]])
        sent.tell_all()
        return Served(sent.blocks, sent.anchor)

    def _has_start(self, names: Sequence[BlockName], identity: Identity, anchor: bool) -> bool:
        """Whether there is something to begin with and, with an anchor, to end with: less is of no use then."""
        if anchor and not self.tiers.lookup(names[-1:], identity).anchored:
            return False
        return self.tiers.lookup(names[:1], identity, anchors=False).blocks > 0

    @asynccontextmanager
    async def putting(self, offer: Offer) -> AsyncIterator[PutSession]:
        """One writer's visit. What it did not commit is forgotten; its landing is freed or, in doubt, quarantined.

        Raises:
            InvalidArgument: the offer can never be taken. Exhausted: too many writers, or no landing memory.
        """
        offer.validate()
        if len(self._awaited) >= self._limits.max_puts:
            raise Exhausted(
                f"{len(self._awaited)} writers already", field="put", fix="offer it later", retry_after_s=0.5
            )
        session = PutSession(self.tiers, self._landings, offer, self._mint(), self._limits.put_bytes)
        self._awaited.add(session.id)
        try:
            with self.tier.pinned(self._parents(offer)):
                yield session
        finally:
            self._awaited.discard(session.id)
            session.close()

    async def grant(self, session: PutSession) -> Granted:
        """What of an offer may come, and where it goes. What another instance holds comes as fast as filling allows;
        beyond that nothing of the offer does: without its start the rest would be of no use here, and it is there.

        Raises:
            Exhausted: no landing memory now.
        """
        blocks = session.new_blocks()
        other, held = await self._hints.elsewhere([block.name.key for block in blocks])
        if other and not self._filling.takes(sum(block.size for block in blocks[:held])):
            return Granted((), (), None, other)
        return session.grant()

    async def commit(self, session: PutSession, records: Sequence[Sequence[Extent]]) -> Committed:
        """Verifies and stores what a session's writer wrote. Raises InvalidArgument for another number of records."""
        committed = await session.commit(records)
        self._metrics.rejected(committed.rejected)
        keys = [record.id.key for record in committed.stored if record.id.kind is RecordKind.BLOCK]
        self._announcer.changed(keys)
        if session.offer.keep_s:
            self.retain(keys, session.offer.keep_s, self.tier.capacity, session.offer.owner)
        return committed

    def retain(self, keys: Sequence[bytes], keep_s: float, budget_bytes: int, owner: Owner = NOBODY) -> tuple[int, int]:
        """Softly protects records from eviction, within the budgets of each tier. Returns how many, and bytes."""
        return self.tiers.retain(keys, keep_s, budget_bytes, owner)

    def damaged(self, record: Record) -> None:
        """Counts and forgets a record of DRAM whose bytes are no longer as they were sealed."""
        self._metrics.corrupt()
        self.tier.drop(record)

    def _parents(self, offer: Offer) -> list[Record]:
        """Records here that the offer continues: they must not be evicted to make room for it."""
        needed = [needed_by(record) for record in offer.records]
        found = [self.tier.by_id(record) for record in needed if record is not None]
        return [record for record in found if record is not None]

    async def _drop_damaged(self, records: Sequence[Record]) -> None:
        """Looks at what a reader refused: its word alone drops nothing."""
        held = [record for record in records if self.tier.by_id(record.id) is record]
        with self.tier.pinned(held):
            intact = await settled(asyncio.to_thread(lambda: [self.tier.is_intact(record) for record in held]))
        for record in compress(held, map(not_, intact)):
            self._metrics.miss("corrupt")
            self.damaged(record)

    def _changed(self, records: Sequence[RecordId]) -> None:
        """They came to a tier or left one."""
        self._announcer.changed([record.key for record in records if record.kind is RecordKind.BLOCK])

    def _where(self, key: bytes) -> Tier | None:
        """The highest tier that holds a block now."""
        record = RecordId(RecordKind.BLOCK, key)
        if self.tier.by_id(record) is not None:
            return Tier.DRAM
        return Tier.NVME if self.tiers.has(record) else None

    def _held(self) -> set[bytes]:
        """Keys of all blocks in any tier."""
        below = self.tiers.nvme.ids if self.tiers.nvme is not None else ()
        return {record.key for record in (*self.tier.ids, *below) if record.kind is RecordKind.BLOCK}


class _Sent:
    """What was sent of a read: records laid out one after the other, blocks numbered from the first one's number."""

    def __init__(self, region: Region, first_block: int, tell: Callable[[Row], object]) -> None:
        self.records: list[Record] = []
        self.blocks, self.anchor = 0, False
        self._region, self._first_block, self._end, self._tell = region, first_block, 0, tell
        self._untold: list[Row] = []

    def place(self, records: Sequence[Record]) -> Pieces:
        """The extents of the next records, where they lie in the tier."""
        rows: list[Row] = []
        starts: list[int] = []
        self.records += records
        for record in records:
            is_block = record.id.kind is RecordKind.BLOCK
            block, at, start = self._first_block + self.blocks if is_block else 0, self._end, record.offset
            for each in record.extents:
                rows.append((each.group, block, each.valid_entries, at + each.offset, each.size, each.digest))
                starts.append(start + each.offset)
            self.blocks, self.anchor = self.blocks + is_block, not is_block
            self._end += record.size
        self._untold += rows
        of = np.zeros(len(rows), np.int64)
        return Pieces(Extents.of(rows), (self._region,), of, np.array(starts, np.int64))

    def tell_all(self) -> None:
        """Tells of what was placed and not told."""
        for row in self._untold:
            self._tell(row)
        self._untold.clear()
