"""Health follows progress, not good intentions."""

from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2

from fabric.health import HealthMonitor, Progress, StallDetector
from tests.support.clock import FakeClock


class Work:
    def __init__(self) -> None:
        self.pending = 0
        self.steps = 0

    def progress(self) -> Progress:
        return Progress(lambda: self.pending, lambda: self.steps, stall_s=10.0)


async def status(monitor: HealthMonitor, name: str = "x.Y") -> int:
    reply = await monitor.servicer.Check(health_pb2.HealthCheckRequest(service=name), None)
    return reply.status


@pytest.fixture
async def parts():
    work, clock = Work(), FakeClock()
    monitor = HealthMonitor(work.progress(), clock)
    await monitor.start(["x.Y"])
    return work, clock, monitor


async def test_not_serving_until_ready(parts):
    _, _, monitor = parts
    assert await status(monitor) == await status(monitor, "") == health_pb2.HealthCheckResponse.NOT_SERVING
    await monitor.set_ready(True)
    assert await status(monitor) == await status(monitor, "") == health_pb2.HealthCheckResponse.SERVING


async def test_a_wedged_engine_is_not_serving_until_it_moves_again(parts):
    work, clock, monitor = parts
    await monitor.set_ready(True)
    work.pending = 1
    await monitor.observe()
    clock.advance(9.9)
    await monitor.observe()
    assert monitor.serving
    clock.advance(0.2)
    await monitor.observe()
    assert await status(monitor) == health_pb2.HealthCheckResponse.NOT_SERVING
    work.steps += 1
    await monitor.observe()
    assert await status(monitor) == health_pb2.HealthCheckResponse.SERVING


async def test_idle_for_long_is_not_wedged_and_new_work_gets_its_whole_allowance(parts):
    work, clock, monitor = parts
    await monitor.set_ready(True)
    clock.advance(10_000.0)
    await monitor.observe()
    work.pending = 1
    clock.advance(9.0)
    await monitor.observe()
    assert monitor.serving


def test_a_slow_but_moving_engine_never_stalls():
    detector = StallDetector(10.0)
    assert not any(detector.stalled(now=9.0 * step, pending=3, steps=step) for step in range(100))


async def test_a_service_that_moves_but_cannot_serve_says_so_until_it_can() -> None:
    reasons = ["", "memory in doubt", "memory in doubt", ""]
    monitor = HealthMonitor(Progress(unfit=lambda: reasons.pop(0)), clock=lambda: 0.0)
    await monitor.start(["s"])
    await monitor.set_ready(True)
    seen = []
    for _ in range(4):
        await monitor.observe()
        seen.append(monitor.serving)
    assert seen == [True, False, False, True]
