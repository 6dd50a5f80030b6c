"""Metrics of a service that runs an engine and moves KV. Knows names and meanings; measures nothing itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.stats import EngineStats
from fabric.errors import DataLoss, ServiceError
from fabric.telemetry.metrics import Metrics


class TransferMetrics:
    """KV bytes that this process sent or received."""

    def __init__(self, metrics: Metrics) -> None:
        self._bytes = metrics.counter("kv_transfer_bytes", "KV bytes moved and, by a receiver, verified")
        self._seconds = metrics.histogram("kv_transfer_seconds", "Time of one KV transfer")
        self._failures = metrics.counter("kv_transfer_failures", "KV transfers that failed", "reason")
        self._mismatches = metrics.counter("kv_transfer_digest_mismatch", "KV transfers whose bytes were not as sealed")

    @contextmanager
    def transfer(self, size_bytes: int) -> Iterator[None]:
        """Measures one transfer, whatever its end."""
        started = time.monotonic()
        try:
            yield
        except ServiceError as error:
            self._failures.labels(error.code).inc()
            if isinstance(error, DataLoss):
                self._mismatches.inc()
            raise
        self._bytes.inc(size_bytes)
        self._seconds.observe(time.monotonic() - started)


_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("requests_running", "Requests that the engine computes", lambda stats: stats.running),
    ("requests_waiting", "Requests that wait for the engine", lambda stats: stats.waiting),
    ("queued_tokens", "Tokens that wait for compute", lambda stats: stats.queued_tokens),
    ("kv_blocks_used", "KV blocks held by requests", lambda stats: stats.blocks_held),
    ("kv_blocks_free", "KV blocks that a request can take", lambda stats: stats.blocks_free + stats.blocks_cached),
    ("kv_slots_used", "Window slots held by requests", lambda stats: stats.slots_held),
    ("steps", "Engine steps since start", lambda stats: stats.steps),
    ("computed_tokens", "Tokens that went through the model since start", lambda stats: stats.computed_tokens),
    ("preemptions_total", "Requests that lost their blocks since start", lambda stats: stats.preemptions),
)


def export_engine(metrics: Metrics, role: str, stats: Callable[[], EngineStats]) -> None:
    """Exports the newest engine statistics as `deepinfer_<role>_*`."""
    for name, text, read in _GAUGES:
        metrics.gauge(f"{role}_{name}", text).set_function(_reading(read, stats))


def _reading(read: Callable[[EngineStats], float], stats: Callable[[], EngineStats]) -> Callable[[], float]:
    return lambda: float(read(stats()))
