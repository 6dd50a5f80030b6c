"""Tells whether a service of ours serves. Knows its ready file, the health service and what a gateway lists."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.task import Endpoints, Probe
from protos.deepinfer.v1 import gateway_pb2, gateway_pb2_grpc


def ready_file(path: Path) -> tuple[Callable[[], None], Probe]:
    """Reset and probe of a service that writes `path` when it is up and answers health checks on its address."""

    def reset() -> None:
        path.unlink(missing_ok=True)

    async def probe() -> Endpoints | None:
        endpoints = read(path)
        if endpoints is None or not await healthy(endpoints.address):
            return None
        return endpoints

    return reset, probe


@dataclass(slots=True)
class Pace:
    """When somebody may be asked again who did not say yes: soon at first, then ever more rarely. clock: seconds."""

    clock: Callable[[], float]
    first_s: float = 0.1
    longest_s: float = 1.0
    _wait_s: float = 0.0
    _due_at: float = 0.0

    def reset(self) -> None:
        """From the start again."""
        self._wait_s = self._due_at = 0.0

    def due(self) -> bool:
        """Whether it is time; if so, the next time is further away."""
        now = self.clock()
        if now < self._due_at:
            return False
        self._wait_s = min(self.longest_s, 2 * self._wait_s or self.first_s)
        self._due_at = now + self._wait_s
        return True


def listing_gateway(
    path: Path, prefills: Sequence[Path], decodes: Sequence[Path], clock: Callable[[], float] = time.monotonic
) -> tuple[Callable[[], None], Probe]:
    """The same for a gateway, which serves once it lists a model on that many workers.

    prefills, decodes: the workers' ready files. While one is missing there is nothing to ask: each question is a line
    in the gateway's log.
    """
    reset_file, probe = ready_file(path)
    pace = Pace(clock)

    def reset() -> None:
        reset_file()
        pace.reset()

    async def probe_listing() -> Endpoints | None:
        if not all(one.exists() for one in (path, *prefills, *decodes)) or not pace.due():
            return None
        endpoints = await probe()
        if endpoints is None:
            return None
        models = await served_models(endpoints.address)
        complete = any(m.prefill_workers >= len(prefills) and m.decode_workers >= len(decodes) for m in models)
        return endpoints if complete else None

    return reset, probe_listing


async def served_models(address: str, timeout_s: float = 1.0) -> list[gateway_pb2.ServedModel]:
    """What the gateway at `address` serves; nothing when it does not answer."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            reply = await stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return []
    return list(reply.models)


def read(path: Path) -> Endpoints | None:
    """What a ready file says; None while it is missing."""
    if not path.exists():
        return None
    said = json.loads(path.read_text())
    return Endpoints(address=said["address"], http=said.get("http", ""), metrics=said.get("metrics", ""))


async def still_healthy(endpoints: Endpoints) -> bool:
    """Whether a service that was found at `endpoints` calls itself SERVING."""
    return await healthy(endpoints.address)


async def healthy(address: str, timeout_s: float = 1.0) -> bool:
    """Whether the service at `address` calls itself SERVING."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
