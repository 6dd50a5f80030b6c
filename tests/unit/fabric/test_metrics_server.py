"""Metrics are served on a port of their own, and a scrape is a line of the log for who asks for such lines alone."""

from __future__ import annotations

import logging
from urllib.request import urlopen

import pytest
import structlog

from fabric.telemetry import metrics
from fabric.telemetry.metrics import Metrics, MetricsServer


@pytest.mark.parametrize(("level", "told"), [("info", []), ("debug", ["scraped"])])
def test_a_scrape_is_told_at_debug_alone(level: str, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = structlog.testing.CapturingLogger()
    least = structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()])
    monkeypatch.setattr(metrics, "_log", structlog.wrap_logger(lines, processors=[_as_it_is], wrapper_class=least))
    server = MetricsServer(Metrics("test"), "127.0.0.1", 0)
    try:
        with urlopen(f"http://{server.address}/metrics", timeout=10.0) as answer:
            assert answer.status == 200 and b"deepinfer_" in answer.read()
    finally:
        server.close()
    assert [call.kwargs["event"] for call in lines.calls] == told
    assert all(call.kwargs["request"].startswith('"GET /metrics') for call in lines.calls)


def _as_it_is(logger: object, name: str, event: dict[str, object]) -> dict[str, object]:
    return event
