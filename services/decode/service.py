"""The decode service: parses calls, hands them to the desk and the engine, packs what comes back."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fabric.deaths import Deaths
from fabric.discovery import open_discovery
from fabric.health import Progress
from fabric.kvlink.landing import LandingPool
from fabric.lifecycle import background
from fabric.processes import is_gone
from fabric.server import Service
from kernels.host.sealed_copy import copy_sealed
from protos.deepinfer.v1 import decode_pb2 as pb
from protos.deepinfer.v1 import decode_pb2_grpc as rpc
from services.decode import wire
from services.decode.desk import Desk, Limits
from services.decode.generation import generate
from services.decode.settings import DecodeSettings
from services.decode.telemetry import DecodeMetrics
from services.decode.tickets import TicketBook
from services.decode.wake import Wake
from services.worker.core import Core, open_core
from services.worker.regions import PoolRegions
from services.worker.status import EngineBoard
from services.worker.storage import open_storage
from services.worker.telemetry import export_engine, export_quarantine
from services.worker.wire import pack_model, pack_status

_MIB = 1 << 20
_SWEEPS_PER_LEASE = 20
_LONGEST_SWEEP_S = 0.5


class DecodeServicer(rpc.DecodeServiceServicer):
    """`deepinfer.v1.DecodeService`."""

    def __init__(self, core: Core, desk: Desk, board: EngineBoard, settings: DecodeSettings) -> None:
        self.core, self.desk, self._board, self._settings = core, desk, board, settings

    async def Info(self, request: pb.DecodeServiceInfoRequest, context: Any) -> pb.DecodeServiceInfoResponse:
        engine, settings = self.core.engine.engine, self._settings
        return pb.DecodeServiceInfoResponse(
            model=pack_model(engine.model),
            instance=self.core.identity.instance,
            epoch=self.core.identity.epoch,
            max_total_tokens=self.desk.limits.max_total_tokens,
            max_sequences=settings.max_sequences,
            lease_ms=round(settings.lease_s * 1000),
            landing_bytes=settings.landing_mb * _MIB,
            transport_lane=self.core.link.lane,
            kernels=self.core.kernels,
        )

    async def Watch(self, request: pb.DecodeServiceWatchRequest, context: Any) -> None:
        identity = self.core.identity
        async for status in self._board.watch():
            packed = pack_status(status, identity.instance, identity.epoch)
            await context.write(pb.DecodeServiceWatchResponse(status=packed))

    async def Reserve(self, request: pb.ReserveRequest, context: Any) -> pb.ReserveResponse:
        holding = await self.desk.reserve(wire.unpack_reserve(request))
        self._board.poke()
        layout = self.core.engine.engine.model.layout
        ticket = wire.pack_ticket(holding, layout, self.core.identity.epoch, self._settings.lease_s)
        return pb.ReserveResponse(ticket=ticket)

    async def Generate(self, requests: AsyncIterator[pb.DecodeServiceGenerateRequest], context: Any) -> None:
        ask = await wire.generate_ask(requests)
        async with self.desk.serving(ask.ticket_id, ask.request_id, ask.receipt.epoch) as holding:
            emit = lambda output: context.write(wire.pack_output(output))  # noqa: E731
            await generate(self.core.engine, self.desk, holding, ask, emit)
        self._board.poke()

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        released = self.desk.release(request.ticket_id, wire.unpack_writer(request.writer), request.epoch)
        return pb.ReleaseResponse(released=released)

    async def drain(self) -> None:
        """Refuses reservations, then tells whoever watches."""
        self.desk.drain()
        await self._board.drain()


@asynccontextmanager
async def build(settings: DecodeSettings) -> AsyncIterator[Service]:
    """A decode worker with its engine, its link and the memory that prefill workers write into.

    Raises:
        StartError: the model, the transport or a setting cannot be used.
    """
    async with AsyncExitStack() as stack:
        core = await stack.enter_async_context(open_core("decode", settings))
        regions = PoolRegions.register(core.link, core.engine.engine.pool)
        keeper = (await stack.enter_async_context(open_storage(core, regions, settings))).keeper
        desk = await stack.enter_async_context(_open_desk(core, settings))
        board = EngineBoard(core.engine, lambda stats: stats.reserved, settings.watch_period_s)
        await stack.enter_async_context(background(board.run(), "status"))
        export_engine(core.metrics, "decode", lambda: board.load.engine)
        runner = core.engine
        # Tickets that wait for their prefill are work too: notices and sweeps are the steps that it takes.
        pending = lambda: desk.open + keeper.pending + (not runner.healthy)  # noqa: E731
        signs = lambda: desk.signs + keeper.done + runner.steps  # noqa: E731
        moving = Progress(pending, signs, settings.wedged_s, lambda: desk.unfit)
        servicer = DecodeServicer(core, desk, board, settings)
        yield Service(
            servicers=[(rpc.add_DecodeServiceServicer_to_server, servicer)],
            progress=moving,
            members=core.member(),
            metrics=core.metrics,
            on_drain=servicer.drain,
        )


@asynccontextmanager
async def _open_desk(core: Core, settings: DecodeSettings) -> AsyncIterator[Desk]:
    landings = LandingPool(core.link, settings.landing_mb * _MIB, kernel=copy_sealed)
    book = TicketBook(core.identity.epoch, settings.lease_s, settings.max_tickets, time.monotonic)
    metrics = DecodeMetrics(core.metrics)
    context = core.engine.engine.model.max_context_tokens
    most = min(settings.max_total_tokens or context, context)
    limits = Limits(most, round(settings.window_mb * _MIB), settings.handoff_timeout_s)
    wake = Wake(Deaths(is_gone), time.monotonic)
    desk = Desk(core.engine, core.link, landings, book, lambda: secrets.token_hex(16), metrics, limits, wake)
    metrics.watch_desk(lambda: desk.open, lambda: desk.quarantined, lambda: bool(desk.unfit))
    export_quarantine(core.metrics, "decode", landings, core.engine.engine.model.layout)
    async with (
        background(desk.follow(), "notices"),
        background(desk.sweep_every(min(_LONGEST_SWEEP_S, settings.lease_s / _SWEEPS_PER_LEASE)), "leases"),
        background(wake.follow(open_discovery(settings.discovery), "prefill"), "prefills"),
    ):
        try:
            yield desk
        finally:
            await desk.close()
