"""The operator's calls on a kvstore: parses them, hands them to catalog and upkeep, packs what comes back."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from fabric.errors import InvalidArgument, Unavailable
from fabric.lifecycle import Identity
from fabric.telemetry.metrics import Metrics
from protos.deepinfer.v1 import kvstore_admin_pb2 as pb
from protos.deepinfer.v1 import kvstore_admin_pb2_grpc as rpc
from services.kvstore import admin_wire as wire
from services.kvstore.catalog import Catalog, Entry, Filter
from services.kvstore.index import Tier
from services.kvstore.offers import KEY_BYTES
from services.kvstore.store import Store
from services.kvstore.tiers import Tiers
from services.kvstore.upkeep import Upkeep

_PREFIX_RECORDS = 64  # of one message
_PREFIX = "deepinfer_kvstore_"


@dataclass(frozen=True, slots=True)
class About:
    """What an instance says of itself beside its records; `started` on the monotonic clock."""

    identity: Identity
    transport: str
    metrics: Metrics
    started: float


class KvStoreAdminServicer(rpc.KvStoreAdminServiceServicer):
    """`deepinfer.v1.KvStoreAdminService`."""

    def __init__(self, about: About, store: Store) -> None:
        self._about, self._tiers = about, store.tiers
        self._catalog = Catalog(store.tiers, time.time)
        self._upkeep = Upkeep(store.tiers, self._catalog, store.damaged)

    async def ListRecords(self, request: pb.ListRecordsRequest, context: Any) -> None:
        wanted = wire.unpack_filter(request.filter)
        if request.ends:
            await self._list_ends(request, wanted, context)
            return
        pages = self._catalog.pages(wanted, request.limit)
        async with aclosing(pages):  # type: ignore[type-var]  # declared as an iterator, is a generator
            async for page in pages:
                records = [await self._told(entry, request.with_tokens) for entry in page]
                await context.write(pb.ListRecordsResponse(records=records))

    async def ReadCounts(self, request: pb.ReadCountsRequest, context: Any) -> pb.ReadCountsResponse:
        about, samples = self._about, _samples(self._about.metrics)
        return pb.ReadCountsResponse(
            instance=about.identity.instance,
            epoch=about.identity.epoch,
            uptime_ms=round((time.monotonic() - about.started) * 1000),
            transport=about.transport,
            tiers=_tiers(self._tiers),
            hits=samples.get("hits_total", 0),
            hit_blocks=samples.get("hit_blocks_total", 0),
            misses={name.partition(":")[2]: n for name, n in samples.items() if name.startswith("misses_total:")},
            corrupt=samples.get("corrupt_total", 0),
            rejected=samples.get("rejected_total", 0),
            index_lost=samples.get("index_lost_total", 0),
            promised_bytes=self._tiers.dram.promised,
        )

    async def VerifyRecords(self, request: pb.VerifyRecordsRequest, context: Any) -> None:
        steps = self._upkeep.verify(wire.unpack_filter(request.filter))
        async with aclosing(steps):  # type: ignore[type-var]  # as above
            async for progress in steps:
                await context.write(wire.pack_verified(progress))

    async def EvictRecords(self, request: pb.EvictRecordsRequest, context: Any) -> None:
        wanted = wire.unpack_filter(request.filter)
        if wanted.empty:
            raise InvalidArgument("it means everything", field="filter", fix="say what shall go, such as idle_ms")
        try:
            async for progress in self._upkeep.evict(wanted, request.execute):
                await context.write(pb.EvictRecordsResponse(records=progress.records, bytes=progress.bytes))
        except OSError as error:
            raise Unavailable(
                f"the disk could not be written: {error.strerror}", fix="see its log and the disk"
            ) from error

    async def ReadPrefix(self, request: pb.ReadPrefixRequest, context: Any) -> None:
        if len(request.key) != KEY_BYTES:
            raise InvalidArgument(
                f"{len(request.key)} bytes", field="key", fix=f"send all {KEY_BYTES} of a block's key"
            )
        records = await self._catalog.prefix(request.key)
        for first in range(0, len(records), _PREFIX_RECORDS):
            message = pb.ReadPrefixResponse(records=map(wire.pack_record, records[first : first + _PREFIX_RECORDS]))
            if first == 0:
                identity = records[0].identity
                message.model_revision, message.layout_fingerprint = (
                    identity.model_revision,
                    identity.layout_fingerprint,
                )
            await context.write(message)

    async def _list_ends(self, request: pb.ListRecordsRequest, wanted: Filter, context: Any) -> None:
        ends = self._catalog.ends(wanted, request.limit)
        async with aclosing(ends):  # type: ignore[type-var]  # as above
            async for entry, prefix in ends:
                told = await self._told(entry, request.with_tokens)
                told.prefix.CopyFrom(pb.PrefixSize(blocks=prefix.blocks, bytes=prefix.bytes, cut=prefix.cut))
                await context.write(pb.ListRecordsResponse(records=[told]))

    async def _told(self, entry: Entry, with_tokens: bool) -> pb.RecordEntry:
        description = await self._catalog.describe(entry.id) if with_tokens else None
        return wire.pack_entry(entry, description, time.time())


def _tiers(tiers: Tiers) -> list[pb.TierCounts]:
    dram, nvme = tiers.dram, tiers.nvme
    told = [
        pb.TierCounts(
            tier=wire.TIER_CODES[Tier.DRAM], capacity_bytes=dram.capacity, used_bytes=dram.used, records=len(dram)
        )
    ]
    if nvme is not None:
        told.append(
            pb.TierCounts(
                tier=wire.TIER_CODES[Tier.NVME],
                capacity_bytes=nvme.capacity,
                used_bytes=nvme.used,
                records=len(nvme),
                queued=nvme.queued,
                events=asdict(nvme.counts),
            )
        )
    return told


def _samples(metrics: Metrics) -> dict[str, int]:
    """The store's own counts by name, with ":" and its label where it has one."""
    return {
        ":".join([sample.name.removeprefix(_PREFIX), *sample.labels.values()]): round(sample.value)
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name.startswith(_PREFIX) and not sample.name.endswith("_created")
    }
