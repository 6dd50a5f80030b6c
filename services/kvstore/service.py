"""The kvstore service: parses calls, hands them to the store, packs what comes back."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from fabric import wire as fabric_wire
from fabric.discovery import MemberInfo
from fabric.health import Progress
from fabric.kvlink import Link, open_link
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.link import Bytes
from fabric.kvlink.metered import export_lane
from fabric.lifecycle import Identity, background, new_identity
from fabric.processes import this_process
from fabric.server import Service
from fabric.telemetry.metrics import Metrics
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import kvstore_pb2 as pb
from protos.deepinfer.v1 import kvstore_pb2_grpc as rpc
from protos.deepinfer.v1.kvstore_admin_pb2_grpc import add_KvStoreAdminServiceServicer_to_server
from services.kvstore import wire
from services.kvstore.admin import About, KvStoreAdminServicer
from services.kvstore.announcer import Announcer, Pace
from services.kvstore.fill import Filling
from services.kvstore.hints import Hints
from services.kvstore.index import open_index
from services.kvstore.memory import ALIGNMENT
from services.kvstore.nvme.files import SegmentFiles
from services.kvstore.nvme.format import PAGE
from services.kvstore.nvme.tier import NvmeTier
from services.kvstore.policy.budget import Budgets
from services.kvstore.policy.retention import Retention, WarmWindow
from services.kvstore.prefetch import Prefetcher
from services.kvstore.settings import KvStoreSettings
from services.kvstore.store import Store, StoreLimits
from services.kvstore.telemetry import StoreMetrics
from services.kvstore.tier import DramTier
from services.kvstore.tiers import Tiers
from services.kvstore.touching import touch

_MIB = 1 << 20
_GIB = 1 << 30
_FINISH_S = 5.0  # at the end, for what waits to be written


class KvStoreServicer(rpc.KvStoreServiceServicer):
    """`deepinfer.v1.KvStoreService`."""

    def __init__(self, identity: Identity, store: Store, link: Link, settings: KvStoreSettings) -> None:
        self._identity, self.store, self._link, self._settings = identity, store, link, settings

    async def Info(self, request: pb.KvStoreServiceInfoRequest, context: Any) -> pb.KvStoreServiceInfoResponse:
        return pb.KvStoreServiceInfoResponse(
            instance=self._identity.instance,
            epoch=self._identity.epoch,
            capacity_bytes=self.store.tier.capacity,
            used_bytes=self.store.tier.used,
            records=len(self.store.tier),
            max_record_bytes=min(self.store.tier.capacity, self._settings.landing_mb * _MIB),
            landing_bytes=self._settings.landing_mb * _MIB,
            transport_lane=self._link.lane,
            digest_kind=common.DIGEST_KIND_XXH3_64,
        )

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        names, identity = wire.names_of(request), wire.unpack_identity(request)
        found = await self.store.lookup(names, identity, request.anchor)
        return pb.LookupResponse(
            blocks_held=found.held.blocks,
            anchor_blocks=found.held.anchored,
            other_instance=found.other_instance,
            other_blocks=found.other_blocks,
        )

    async def Get(self, request: pb.GetRequest, context: Any) -> pb.GetResponse:
        names = wire.names_of(request, wire.unpack_parent(request))
        identity = wire.unpack_identity(request)
        landing, first = fabric_wire.unpack_landing(request.landing), request.first_block
        answer = wire.Answer()
        return answer.done(await self.store.get(names, first, request.anchor, identity, landing, answer.tell))

    async def Prefetch(self, request: pb.PrefetchRequest, context: Any) -> pb.PrefetchResponse:
        names, identity = wire.names_of(request), wire.unpack_identity(request)
        rising, other = await self.store.prefetch(names, identity, request.anchor)
        return pb.PrefetchResponse(blocks_held=rising.held, blocks_rising=rising.rising, other_instance=other)

    async def Put(self, requests: AsyncIterator[pb.PutRequest], context: Any) -> None:
        offer = wire.unpack_offer((await wire.next_message(requests, "offer")).offer)
        async with self.store.putting(offer) as session:
            await context.write(wire.pack_grant(await self.store.grant(session)))
            commit = (await wire.next_message(requests, "commit")).commit
            committed = await self.store.commit(session, wire.unpack_commit(commit))
            done = pb.PutCommitted(stored=len(committed.stored), rejected=committed.rejected)
            await context.write(pb.PutResponse(committed=done))

    async def Retain(self, request: pb.RetainRequest, context: Any) -> pb.RetainResponse:
        keep = wire.unpack_keep(request, self.store.tier.capacity)
        retained, size = self.store.retain(keep.keys, keep.keep_s, keep.most_bytes, keep.owner)
        return pb.RetainResponse(retained=retained, bytes=size)


@asynccontextmanager
async def build(settings: KvStoreSettings) -> AsyncIterator[Service]:
    """One kvstore instance with its slab, its link and its index.

    Raises:
        StartError: the transport or the index is none that exists.
    """
    identity, metrics = new_identity("kvstore", settings.instance), Metrics("kvstore")
    async with AsyncExitStack() as stack:
        index = open_index(settings.index.get_secret_value(), settings.index_ttl_s, time.monotonic)
        stack.push_async_callback(index.close)
        link = open_link(settings.transport, identity.instance, identity.epoch)
        stack.push_async_callback(link.close)
        export_lane(link, metrics)
        hints = Hints(index, identity.instance, time.monotonic)
        pace = Pace(settings.index_ttl_s, settings.index_keys_per_s)
        announcer = Announcer(index, identity.instance, str(identity.epoch), pace, time.monotonic)
        nvme = _open_nvme(settings)
        if nvme is not None:
            stack.callback(nvme.close)
        tiers = _open_tiers(settings, nvme, partial(link.allocate, touched=False))
        prefetcher = Prefetcher(tiers, tiers.dram.capacity // 2)
        store = _open_store(settings, tiers, link, hints, announcer, prefetcher, metrics)
        stack.push_async_callback(store.leftovers.aclose)
        await _work_behind(stack, store, prefetcher, announcer, nvme)
        admin = KvStoreAdminServicer(About(identity, settings.transport, metrics, time.monotonic()), store)
        yield Service(
            servicers=[
                (rpc.add_KvStoreServiceServicer_to_server, KvStoreServicer(identity, store, link, settings)),
                (add_KvStoreAdminServiceServicer_to_server, admin),
            ],
            progress=_progress(store, settings),
            members=_member(identity, store.tier.capacity),
            metrics=metrics,
        )


async def _work_behind(
    stack: AsyncExitStack, store: Store, prefetcher: Prefetcher, announcer: Announcer, nvme: NvmeTier | None
) -> None:
    """Everything that runs beside the calls; each part ends with the stack, in the reverse order."""
    await stack.enter_async_context(background(prefetcher.run(), "prefetches"))
    stack.push_async_callback(announcer.leave)
    await stack.enter_async_context(background(announcer.run(), "announcer"))
    if nvme is not None:
        await stack.enter_async_context(background(nvme.run(), "nvme"))
        stack.push_async_callback(nvme.finish, _FINISH_S)
    await stack.enter_async_context(background(store.tiers.run(), "idle"))
    await stack.enter_async_context(background(touch(store.tiers.dram.memory), "touching"))
    await stack.enter_async_context(background(store.follow(), "notices"))


def _progress(store: Store, settings: KvStoreSettings) -> Progress:
    """What is left of reads: a drain waits for it, and all of it ends by itself before it counts as stuck."""
    stall_s = Progress().stall_s + 3 * settings.push_timeout_s
    return Progress(lambda: store.leftovers.pending, lambda: store.leftovers.done, stall_s)


def _member(identity: Identity, capacity_bytes: int) -> MemberInfo:
    """How this instance is announced: with its process, so that its death can be proven."""
    process = this_process()
    return MemberInfo(
        service="kvstore",
        instance=identity.instance,
        address="",
        epoch=identity.epoch,
        process=process.pack() if process is not None else "",
        capacity={"bytes": capacity_bytes},
    )


def _open_nvme(settings: KvStoreSettings) -> NvmeTier | None:
    if settings.nvme_dir is None:
        return None
    files = SegmentFiles(settings.nvme_dir, settings.nvme_segment_mb * _MIB, settings.nvme_direct)
    queue = round(settings.nvme_queue_share * settings.memory_mb * _MIB)
    retention = Retention(settings.anchor_retention)
    size = round(settings.nvme_gb * _GIB)
    return NvmeTier(files, size, time.time, queue, retention, _budgets(settings, size))


def _budgets(settings: KvStoreSettings, capacity_bytes: int) -> Budgets:
    return Budgets(round(settings.owner_budget_share * capacity_bytes), round(settings.budget_share * capacity_bytes))


def _open_tiers(settings: KvStoreSettings, nvme: NvmeTier | None, allocate: Callable[[int], Bytes]) -> Tiers:
    warm = WarmWindow(settings.warm_h * 3600) if nvme is not None else None
    memory = settings.memory_mb * _MIB
    alignment = PAGE if nvme is not None and settings.nvme_direct else ALIGNMENT
    retention = Retention(settings.anchor_retention)
    dram = DramTier(memory, time.monotonic, warm, _budgets(settings, memory), retention, alignment, allocate)
    return Tiers(dram, nvme, time.time)


def _open_store(
    settings: KvStoreSettings,
    tiers: Tiers,
    link: Link,
    hints: Hints,
    announcer: Announcer,
    prefetcher: Prefetcher,
    metrics: Metrics,
) -> Store:
    exported, tier, nvme = StoreMetrics(metrics), tiers.dram, tiers.nvme
    landings = LandingPool(link, settings.landing_mb * _MIB)
    limits = StoreLimits(settings.max_puts, settings.landing_mb * _MIB // 2, settings.push_timeout_s)
    exported.watch(lambda: tier.used, lambda: len(tier), lambda: tiers.allowance.taken)
    filling = Filling(settings.fill_mb_per_s * _MIB, time.monotonic)
    exported.watch_index(hints, announcer, filling)
    if nvme is not None:
        exported.watch_nvme(nvme)
    exported.watch_prefetches(prefetcher.counts)
    mint = partial(secrets.token_hex, 16)
    return Store(tiers, link, landings, hints, announcer, filling, prefetcher, limits, mint, exported)
