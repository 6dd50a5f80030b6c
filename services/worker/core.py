"""Core: what every engine-running service opens at its start and closes at its end. Knows no request."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from blake3 import blake3

from engine.cache.staging import Allocate
from engine.engine import Engine
from engine.runner import EngineRunner
from fabric.discovery import MemberInfo
from fabric.kvlink import Link, open_link
from fabric.kvlink.metered import export_lane
from fabric.lifecycle import Identity, new_identity
from fabric.processes import this_process
from fabric.telemetry import logs
from fabric.telemetry.metrics import Metrics
from kernels import cache, choose
from kernels.host.scattered_copy import copy_scattered
from services.worker.preflight import refusals
from services.worker.settings import WorkerSettings
from services.worker.telemetry import StepMetrics

_log = logs.get("start")
# Python's default of 5 ms lets the engine's thread keep the event loop waiting for as long as a network round trip.
_SWITCH_S = 0.0005


@dataclass(frozen=True, slots=True)
class Core:
    """A loaded engine on its own thread, and one end of the KV link."""

    service: str
    identity: Identity
    engine: EngineRunner
    link: Link
    metrics: Metrics
    kernels: str  # the operators in use, after "auto" was decided

    def member(self) -> MemberInfo:
        """How this instance is announced."""
        model, process = self.engine.engine.model, this_process()
        return MemberInfo(
            service=self.service,
            instance=self.identity.instance,
            address="",
            epoch=self.identity.epoch,
            model=model.name,
            revision=model.revision,
            layout_fingerprint=model.layout.fingerprint,
            record_versions=tuple(group.record_version for group in model.layout.groups),
            process=process.pack() if process is not None else "",
            capacity={"max_context_tokens": model.max_context_tokens, "blocks": self.engine.engine.memory.blocks.total},
        )


@asynccontextmanager
async def open_core(service: str, settings: WorkerSettings) -> AsyncIterator[Core]:
    """Loads the model and opens the link.

    Raises:
        StartError: the model, a setting or the transport cannot be used; the message names it and the fix.
    """
    identity = new_identity(service, settings.instance)
    sys.setswitchinterval(_SWITCH_S)
    async with AsyncExitStack() as stack:
        metrics = Metrics(service)
        # First: a missing lane shows at once.
        link = open_link(settings.transport, identity.instance, identity.epoch, copy_scattered)
        stack.push_async_callback(link.close)
        export_lane(link, metrics)
        # The pool lies where peers of this host can read it.
        allocate = partial(link.allocate, touched=False)
        engine, kernels = await asyncio.to_thread(_open_engine, settings, allocate)
        runner = EngineRunner(engine, observe=StepMetrics(metrics, service).observe)
        stack.push_async_callback(runner.close)
        metrics.build_info("model", engine.model.name)
        metrics.build_info("revision", engine.model.revision)
        metrics.build_info("transport", settings.transport)
        metrics.build_info("kernels", kernels)
        metrics.build_info("device", settings.device)
        window_state = engine.model.layout.window_policy
        metrics.build_info("window_state", window_state)
        blocks = engine.memory.blocks.total
        on = {"device": settings.device, "dtype": settings.compute_dtype, "kernels": kernels, "kv": settings.kv_cache}
        _log.info("model loaded", model=engine.model.name, blocks=blocks, **on, window_state=window_state)
        yield Core(service, identity, runner, link, metrics, kernels)


def _compiled_for(settings: WorkerSettings) -> str:
    """Names what decides which kernels the warm-up compiles."""
    config = settings.model / "config.json"
    family = config.read_bytes() if config.is_file() else b""
    return blake3(f"{settings.compute_dtype} {settings.batch_invariant} ".encode() + family).hexdigest()[:16]


def _open_engine(settings: WorkerSettings, allocate: Allocate) -> tuple[Engine, str]:
    with refusals():
        stored, records = settings.weights == "stored", settings.kv_cache == "records"
        kernels = choose(settings.kernels, settings.device, settings.batch_invariant, stored, records).name
        compiled = cache.folder_of(kernels)
        with cache.compiled_once(compiled, _compiled_for(settings), _log.info):
            engine = Engine.open(settings.engine_config(), allocate=allocate)
        for old in cache.sweep(compiled, time.time()):
            _log.info("kernels of an older version removed", folder=old.name)
        return engine, kernels
