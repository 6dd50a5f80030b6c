"""The doctor on a gateway that runs: whether it knows exactly what its workers cache."""

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cli import knowledge
from cli.doctor import Health
from cli.runtime import StackRecord
from fabric.telemetry.metrics import Metrics
from services.gateway.meters import Meters
from services.gateway.mirror import Knowledge

HERE = StackRecord(pid=1, started=0.0, http="", grpc="", model="m", log_dir="", pids={}, addresses={})


def told(exact: int, degraded: int) -> str:
    """Metrics as a gateway exports them."""
    metrics = Metrics("gateway")
    known = {Knowledge.EXACT: exact, Knowledge.DEGRADED: degraded}
    Meters(metrics, lambda: 0, lambda: 0).watch_knowledge(lambda: known, {})
    assert isinstance(metrics.registry, CollectorRegistry)
    return generate_latest(metrics.registry).decode()


@pytest.mark.parametrize(
    ("exact", "degraded", "health", "said"),
    [(3, 0, Health.OK, "exactly what 3 workers"), (2, 1, Health.WARN, "in part what 1 of 3 workers")],
)
def test_degraded_knowledge_is_told(exact: int, degraded: int, health: Health, said: str) -> None:
    finding = knowledge.judge(told(exact, degraded))
    assert finding.health is health and said in finding.detail
    assert bool(finding.fix) == (health is Health.WARN)


def test_every_stack_that_has_a_gateway_is_asked() -> None:
    stacks = [replace(HERE, pid=pid, http=http) for pid, http in ((7, "127.0.0.1:1"), (8, "127.0.0.1:1"), (9, ""))]
    checks = knowledge.checks(stacks)
    assert list(checks) == ["gateway of 7", "gateway of 8"]
    finding = checks["gateway of 7"]()
    assert finding.health is Health.FAIL and "127.0.0.1:1 does not answer: ConnectError" in finding.detail
