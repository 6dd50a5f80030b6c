"""A gateway is asked what it lists when the answer can be yes, and not ten times a second until then."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cli.probes import Pace, listing_gateway
from protos.deepinfer.v1 import gateway_pb2, gateway_pb2_grpc

TICK_S = 0.1


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Gateway(gateway_pb2_grpc.GatewayServiceServicer):
    address: str = ""
    workers: int = 0
    asked_at: list[float] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)

    async def ListModels(self, request: gateway_pb2.ListModelsRequest, context: Any) -> gateway_pb2.ListModelsResponse:
        self.asked_at.append(self.clock.now)
        model = gateway_pb2.ServedModel(prefill_workers=self.workers, decode_workers=self.workers)
        return gateway_pb2.ListModelsResponse(models=[model])


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    servicer, server, healthy = Gateway(), grpc.aio.server(), health.aio.HealthServicer()
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    yield servicer
    await server.stop(None)


async def test_a_gateway_is_not_asked_before_its_workers_are_there_and_rarely_while_it_does_not_know_them(
    gateway: Gateway, tmp_path: Path
) -> None:
    own, workers = tmp_path / "gateway.ready", [tmp_path / "prefill-0.ready", tmp_path / "decode-0.ready"]
    own.write_text(json.dumps({"address": gateway.address}))
    reset, probe = listing_gateway(own, workers[:1], workers[1:], gateway.clock)

    async def ticks(seconds: float) -> Any:
        for _ in range(round(seconds / TICK_S)):
            gateway.clock.now += TICK_S
            if found := await probe():
                return found
        return None

    assert await ticks(10) is None and gateway.asked_at == []
    for worker in workers:
        worker.write_text("{}")
    assert await ticks(20) is None
    assert 10 < gateway.asked_at[0] <= 10 + 1.5 * TICK_S, "at once when the last worker is there"
    assert len(gateway.asked_at) <= 25
    gateway.workers = 1
    found = await ticks(3)
    assert found is not None and found.address == gateway.address
    reset()
    assert not own.exists() and await ticks(1) is None


def test_a_pace_begins_anew_where_the_process_does() -> None:
    clock = Clock()
    pace = Pace(clock, first_s=1.0, longest_s=4.0)
    due = []
    for _ in range(20):
        if pace.due():
            due.append(clock.now)
        clock.now += 1
    assert due == [0, 1, 3, 7, 11, 15, 19]
    pace.reset()
    assert pace.due()
