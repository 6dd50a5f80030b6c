"""Tells whether a service of ours serves. Knows its ready file and the standard health service, not what it does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.task import Endpoints, Probe


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


def read(path: Path) -> Endpoints | None:
    """What a ready file says; None while it is missing."""
    if not path.exists():
        return None
    said = json.loads(path.read_text())
    return Endpoints(address=said["address"], http=said.get("http", ""), metrics=said.get("metrics", ""))


async def healthy(address: str, timeout_s: float = 1.0) -> bool:
    """Whether the service at `address` calls itself SERVING."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
