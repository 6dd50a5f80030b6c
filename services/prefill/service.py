"""The prefill service: parses calls, hands them to jobs, packs what comes back."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from fabric.deaths import Deaths
from fabric.discovery import open_discovery
from fabric.errors import DeadlineExceeded
from fabric.health import Progress
from fabric.kvlink import Link
from fabric.kvlink.incoming import Intake
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.leftovers import Leftovers
from fabric.kvlink.outgoing import Sender
from fabric.kvlink.slabs import SlabState, Writer
from fabric.lifecycle import background
from fabric.processes import is_gone
from fabric.server import Service
from kernels.host.sealed_copy import copy_sealed
from protos.deepinfer.v1 import prefill_pb2 as pb
from protos.deepinfer.v1 import prefill_pb2_grpc as rpc
from services.prefill import wire
from services.prefill.inbound import Inbound
from services.prefill.job import Tools
from services.prefill.load import Loader
from services.prefill.prefetch import Prefetcher
from services.prefill.push import PoolSource
from services.prefill.settings import PrefillSettings
from services.prefill.telemetry import PrefillMetrics
from services.prefill.worker import PrefillWorker
from services.worker.core import Core, open_core
from services.worker.doubts import Doubts
from services.worker.regions import PoolRegions
from services.worker.scopes import unpack_salt
from services.worker.storage import Storage, open_storage
from services.worker.telemetry import export_engine, export_quarantine
from services.worker.wire import pack_model, pack_status

_MIB = 1 << 20
_SWEEP_S = 0.5
_SLACK_S = 5.0  # beyond what every write ends in by itself


class PrefillServicer(rpc.PrefillServiceServicer):
    """`deepinfer.v1.PrefillService`."""

    def __init__(self, core: Core, worker: PrefillWorker, settings: PrefillSettings) -> None:
        self.core, self.worker, self._settings = core, worker, settings

    async def Info(self, request: pb.PrefillServiceInfoRequest, context: Any) -> pb.PrefillServiceInfoResponse:
        return pb.PrefillServiceInfoResponse(
            model=pack_model(self.core.engine.engine.model),
            instance=self.core.identity.instance,
            epoch=self.core.identity.epoch,
            max_prompt_tokens=self.worker.max_prompt_tokens,
            chunk_tokens=self._settings.chunk_tokens,
            transport_lane=self.core.link.lane,
            kernels=self.core.kernels,
        )

    async def Watch(self, request: pb.PrefillServiceWatchRequest, context: Any) -> None:
        identity = self.core.identity
        async for status in self.worker.board.watch():
            packed = pack_status(status, identity.instance, identity.epoch)
            await context.write(pb.PrefillServiceWatchResponse(status=packed))

    async def Prefill(self, requests: AsyncIterator[pb.PrefillRequest], context: Any) -> None:
        ask = await wire.first_message(requests)
        inbound = Inbound(requests)
        report = lambda progress: context.write(wire.pack_progress(progress))  # noqa: E731
        try:
            await inbound.during(self.worker.run(ask, inbound.ticket, report))
        except Exception as error:  # a caller takes it that nothing is written any more, unless it hears of a deadline
            if not await self.worker.written(ask.request_id) and not isinstance(error, DeadlineExceeded):
                raise DeadlineExceeded("a write that was given up may still arrive") from error
            raise

    async def Prefetch(
        self, request: pb.PrefillServicePrefetchRequest, context: Any
    ) -> pb.PrefillServicePrefetchResponse:
        salt = unpack_salt(request.salt, request.scope)
        found = await self.worker.prefetch(tuple(request.token_ids), salt)
        return pb.PrefillServicePrefetchResponse(held_tokens=found.held_tokens, rising_tokens=found.rising_tokens)


@asynccontextmanager
async def build(settings: PrefillSettings) -> AsyncIterator[Service]:
    """A prefill worker with its engine, its link and, where discovery names one, its kvstore.

    Raises:
        StartError: the model, the transport or a setting cannot be used.
    """
    async with AsyncExitStack() as stack:
        core = await stack.enter_async_context(open_core("prefill", settings))
        regions = PoolRegions.register(core.link, core.engine.engine.pool)
        storage = await stack.enter_async_context(open_storage(core, regions, settings))
        worker = await stack.enter_async_context(_open_worker(core, regions, storage, settings))
        runner, keeper = core.engine, storage.keeper
        yield Service(
            servicers=[(rpc.add_PrefillServiceServicer_to_server, PrefillServicer(core, worker, settings))],
            progress=Progress(
                lambda: worker.unfinished + keeper.pending + (not runner.healthy),
                lambda: worker.finished + keeper.done + runner.steps,
                settings.wedged_s,
            ),
            members=core.member(),
            metrics=core.metrics,
            on_drain=worker.board.drain,
        )


@asynccontextmanager
async def _open_worker(
    core: Core, regions: PoolRegions, storage: Storage, settings: PrefillSettings
) -> AsyncIterator[PrefillWorker]:
    engine, link, pool = core.engine, core.link, core.engine.engine.pool
    metrics = PrefillMetrics(core.metrics)
    source = PoolSource(pool, regions.blocks, regions.slots)
    async with AsyncExitStack() as stack:
        landings = LandingPool(link, settings.landing_mb * _MIB, kernel=copy_sealed)
        export_quarantine(core.metrics, "prefill", landings, pool.layout)
        mint = partial(secrets.token_hex, 16)
        intake = Intake(link, landings)
        stack.push_async_callback(intake.aclose)
        window = round(settings.window_mb * _MIB)
        doubts = await stack.enter_async_context(_open_doubts(intake, landings, settings))
        loader = Loader(engine, storage.stores, intake, window, mint, settings.kvstore_timeout_s, metrics, doubts)
        sender = Sender(link, settings.send_limits())
        # Of one request: the end of a write, and the word that it was the last.
        leftovers = Leftovers(2 * settings.push_timeout_s + _SLACK_S)
        stack.push_async_callback(leftovers.aclose)
        await stack.enter_async_context(background(_follow(link, sender, loader), "notices"))
        prefetcher = Prefetcher(engine, storage.stores, settings.kvstore_timeout_s, metrics)
        waits = (settings.heartbeat_s, settings.ticket_wait_s)
        tools = Tools(engine, sender, leftovers, source, loader, prefetcher, *waits, metrics)
        worker = PrefillWorker(tools, settings)
        export_engine(core.metrics, "prefill", lambda: worker.board.load.engine)
        await stack.enter_async_context(background(worker.board.run(), "status"))
        yield worker


@asynccontextmanager
async def _open_doubts(intake: Intake, landings: LandingPool, settings: PrefillSettings) -> AsyncIterator[Doubts]:
    """Landings that a store was asked to write into and did not say that it is done with."""

    def free(landing_id: str) -> None:
        intake.stop(landing_id, Writer.DEAD)

    settled = lambda landing_id: landings.state(landing_id) is SlabState.FREE  # noqa: E731
    doubts = Doubts(Deaths(is_gone), time.monotonic, settled, free)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(background(doubts.sweep_every(_SWEEP_S), "doubts"))
        if settings.kvstore:
            following = doubts.follow(open_discovery(settings.discovery), "kvstore")
            await stack.enter_async_context(background(following, "kvstores"))
        yield doubts


async def _follow(link: Link, sender: Sender, loader: Loader) -> None:
    """Gives each notice to whom it is for, until cancelled."""
    async for notice in link.notices():
        if not sender.noticed(notice):
            loader.noticed(notice)
