"""Putter: takes the records of one offer to one store, in as many visits as the store has room for. Holds nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from engine.model import ModelInfo
from fabric import failpoints, wire
from fabric.channels import stream
from fabric.kvlink import Link
from fabric.retention import Keeping
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import kvstore_pb2 as pb
from services.worker.items import Item, fetch, seal, writes_of
from services.worker.notices import HandoffNotice
from services.worker.regions import PoolRegions
from services.worker.stores import Store
from services.worker.telemetry import StoreMetrics
from services.worker.together import settled

_GRANTED = failpoints.declare("worker.put.granted")  # a store gave a landing, nothing was written
_WRITTEN = failpoints.declare("worker.put.written")  # everything was written, nothing was committed
MOST_RECORDS = 4096  # of one visit: what a store takes


@dataclass(frozen=True, slots=True)
class Stored:
    """How many records were stored. `elsewhere` names the store that has their start, where they belong for now."""

    records: int
    elsewhere: str = ""


class Putter:
    """One end of the link and the memory that is written from."""

    def __init__(self, model: ModelInfo, link: Link, regions: PoolRegions, metrics: StoreMetrics) -> None:
        self._model, self._link, self._regions, self._metrics = model, link, regions, metrics

    async def put(self, store: Store, items: Sequence[Item], keeping: Keeping, until_s: float) -> Stored:
        """Offers the items until none is left that the store wants; a store grants no more than it has landing for.

        It ends early where the store names another one. What `items` name must not change before this ends.
        `until_s`: of the event loop's clock.

        Raises:
            ServiceError: the store refused, or did not answer in time.
        """
        stored, left = 0, list(items)
        while left:
            visited = left[:MOST_RECORDS]
            visit = _Visit(visited, keeping, until_s)
            stored += await self._visit(store, visit)
            if visit.elsewhere:
                return Stored(stored, visit.elsewhere)
            left = left[visit.wanted[-1] + 1 if visit.wanted else len(visited) :]
        return Stored(stored)

    async def _visit(self, store: Store, visit: _Visit) -> int:
        put = stream(store.stub.Put, self._messages(visit), timeout_s=visit.left_s())
        async with aclosing(put) as replies:  # type: ignore[type-var]  # declared as an iterator, is a generator
            async for reply in replies:
                if reply.WhichOneof("message") == "grant":
                    visit.wanted, visit.elsewhere = list(reply.grant.wanted), reply.grant.other_instance
                    visit.commit.set_result(await self._fill(visit, reply.grant))
                else:
                    stored: int = reply.committed.stored
                    self._metrics.records(stored, reply.committed.rejected)
                    return stored
        return 0

    async def _messages(self, visit: _Visit) -> AsyncIterator[pb.PutRequest]:
        yield pb.PutRequest(
            offer=pb.PutOffer(
                records=[item.offer for item in visit.items],
                model_revision=self._model.revision,
                layout=wire.pack_layout(self._model.layout),
                retention=wire.pack_retention(visit.keeping.retention),
                owner=visit.keeping.owner,
            )
        )
        yield await visit.commit

    async def _fill(self, visit: _Visit, grant: pb.PutGrant) -> pb.PutRequest:
        """Writes the wanted records into the granted landing and names them with their digests."""
        wanted = [visit.items[index] for index in grant.wanted]
        landing, offsets = wire.unpack_landing(grant.landing), list(grant.offsets)
        if wanted:
            await _GRANTED.reached()
            if self._regions.pool.is_apart:
                await asyncio.to_thread(fetch, wanted, self._regions)
            writes = writes_of(wanted, offsets, landing, self._regions)
            notify = HandoffNotice(landing.id, last=True).dump()
            await settled(self._link.push(landing.address, writes, notify=notify, timeout_s=visit.left_s()))
            self._metrics.written(sum(item.offer.size for item in wanted))
            await _WRITTEN.reached()
        sealed = await asyncio.to_thread(seal, wanted, offsets, self._regions)
        records = [wire.pack_extents(extents) for extents in sealed]
        return pb.PutRequest(commit=pb.PutCommit(records=records, digest_kind=common.DIGEST_KIND_XXH3_64))


class _Visit:
    """One Put call: what is offered, and what of it was wanted once that is known."""

    def __init__(self, items: Sequence[Item], keeping: Keeping, until_s: float) -> None:
        self.items, self.keeping, self._until_s = items, keeping, until_s
        self._loop = asyncio.get_running_loop()
        self.wanted: list[int] = []
        self.elsewhere = ""
        self.commit: asyncio.Future[pb.PutRequest] = self._loop.create_future()

    def left_s(self) -> float:
        """Seconds until nothing of this may go on; never 0, which would mean none at all."""
        return max(0.001, self._until_s - self._loop.time())
