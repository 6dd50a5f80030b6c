"""Keep: offers finished prompts to the kvstore, off the critical path. Owns their blocks until the offer ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from engine.errors import EngineError
from engine.requests import SealedKV
from engine.runner import EngineRunner
from fabric import wire
from fabric.channels import stream
from fabric.errors import ServiceError
from fabric.kvlink import Link, Write, plan
from fabric.kvlink.verify import digest
from fabric.records import Extent, Landing
from fabric.telemetry import logs
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import kvstore_pb2 as pb
from services.prefill.push import PoolSource
from services.prefill.telemetry import PrefillMetrics
from services.worker.geometry import record_places
from services.worker.notices import HandoffNotice
from services.worker.stores import Stores
from services.worker.together import settled

_log = logs.get("keep")


@dataclass(frozen=True, slots=True)
class _Item:
    """One record to offer: row `row` of the block pool, or of the slot pool where `anchor`."""

    offer: pb.RecordOffer
    row: int
    anchor: bool
    tokens: int  # what its entries are counted from: of the block, or of the whole prefix


class Keeper:
    """A bounded queue in front of one worker: a prompt that finds it full is not stored."""

    def __init__(
        self,
        engine: EngineRunner,
        stores: Stores,
        link: Link,
        source: PoolSource,
        bound: int,
        timeout_s: float,
        metrics: PrefillMetrics,
    ) -> None:
        self._engine, self._stores, self._link, self._source = engine, stores, link, source
        self._metrics = metrics
        self._queue: asyncio.Queue[tuple[str, SealedKV]] = asyncio.Queue(bound)
        self._timeout_s = timeout_s

    def keep(self, request_id: str, sealed: SealedKV) -> None:
        """Takes over the request's blocks: stores what is new, then releases them. Releases at once if it cannot."""
        has_new = len(sealed.blocks) > sealed.cached_blocks
        if not has_new or self._queue.full() or self._stores.home(sealed.blocks[0].key) is None:
            self._engine.release(request_id)
            return
        self._queue.put_nowait((request_id, sealed))

    async def run(self) -> None:
        """Stores until cancelled."""
        while True:
            request_id, sealed = await self._queue.get()
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._store(sealed)
            except (ServiceError, EngineError, TimeoutError) as error:
                _log.info("a prompt was not stored", error=type(error).__name__)
            finally:
                self._engine.release(request_id)

    async def close(self) -> None:
        """Releases what still waits."""
        while not self._queue.empty():
            self._engine.release(self._queue.get_nowait()[0])

    async def _store(self, sealed: SealedKV) -> None:
        store = self._stores.home(sealed.blocks[0].key)
        if store is None:
            return
        items = _items(sealed, self._source)
        commit: asyncio.Future[pb.PutRequest] = asyncio.get_running_loop().create_future()
        put = stream(store.stub.Put, self._messages(items, commit), timeout_s=self._timeout_s)
        with self._stores.asking(store):
            async with aclosing(put) as replies:  # type: ignore[type-var]  # declared as an iterator, is a generator
                async for reply in replies:
                    if reply.WhichOneof("message") == "grant":
                        commit.set_result(await self._fill(items, reply.grant))
                    else:
                        self._metrics.kept(reply.committed.stored, reply.committed.rejected)

    async def _messages(
        self, items: Sequence[_Item], commit: asyncio.Future[pb.PutRequest]
    ) -> AsyncIterator[pb.PutRequest]:
        model = self._engine.engine.model
        records = [item.offer for item in items]
        layout = wire.pack_layout(model.layout)
        yield pb.PutRequest(offer=pb.PutOffer(records=records, model_revision=model.revision, layout=layout))
        yield await commit

    async def _fill(self, items: Sequence[_Item], grant: pb.PutGrant) -> pb.PutRequest:
        """Writes the wanted records into the granted landing and names them with their digests."""
        wanted = [items[index] for index in grant.wanted]
        landing, offsets = wire.unpack_landing(grant.landing), list(grant.offsets)
        if wanted:
            writes = self._writes(wanted, offsets, landing)
            notify = HandoffNotice(landing.id, last=True).dump()
            await settled(self._link.push(landing.address, writes, notify=notify, timeout_s=self._timeout_s))
        sealed = await asyncio.to_thread(self._seal, wanted, offsets)
        records = [wire.pack_extents(extents) for extents in sealed]
        return pb.PutRequest(commit=pb.PutCommit(records=records, digest_kind=common.DIGEST_KIND_XXH3_64))

    def _writes(self, wanted: Sequence[_Item], offsets: Sequence[int], landing: Landing) -> list[Write]:
        """One array of descriptors for all blocks, one for the anchor."""
        layout, writes = self._engine.engine.model.layout, []
        for anchor, region, size in (
            (False, self._source.blocks, layout.block_bytes),
            (True, self._source.slots, layout.window_bytes),
        ):
            chosen = [index for index, item in enumerate(wanted) if item.anchor is anchor]
            rows = np.array([wanted[index].row for index in chosen], dtype=np.int64)
            places = np.array([offsets[index] for index in chosen], dtype=np.int64)
            sizes = np.full(len(chosen), size, dtype=np.int64)
            if chosen and region is not None:
                writes.append(plan.write_to(landing, region, rows * size, places, sizes))
        return writes

    def _seal(self, wanted: Sequence[_Item], offsets: Sequence[int]) -> list[list[Extent]]:
        return [self._sealed(item, offset) for item, offset in zip(wanted, offsets, strict=True)]

    def _sealed(self, item: _Item, offset: int) -> list[Extent]:
        pool, layout = self._source.pool, self._source.pool.layout
        view = pool.slot_extent if item.anchor else pool.block_extent
        places = record_places(layout.windows if item.anchor else layout.globals, item.tokens, offset)
        return [place.sealed(digest(view(place.group, item.row))) for place in places]


def _items(sealed: SealedKV, source: PoolSource) -> list[_Item]:
    """The records of a prompt in the order of its blocks, the anchor after the block that it ends."""
    layout, items = source.pool.layout, []
    for block in sealed.blocks:
        name = pb.BlockName(key=block.key, token_ids=block.tokens)
        size = layout.block_bytes
        offer = pb.RecordOffer(kind=pb.RECORD_KIND_BLOCK, name=name, parent_key=block.parent, size=size)
        items.append(_Item(offer, block.block, anchor=False, tokens=layout.block_tokens))
        if sealed.anchor is not None and sealed.anchor.key == block.key:
            size = layout.window_bytes
            offer = pb.RecordOffer(kind=pb.RECORD_KIND_ANCHOR, name=name, parent_key=block.parent, size=size)
            items.append(_Item(offer, sealed.anchor.slot, anchor=True, tokens=sealed.anchor.tokens))
    return items
