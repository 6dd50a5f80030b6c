"""Metrics of a service that runs an engine and moves KV. Knows names and meanings; measures nothing itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.layout import Layout
from engine.runner import Step
from engine.stats import EngineStats
from fabric.errors import DataLoss, ServiceError
from fabric.kvlink.landing import LandingPool
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


class StoreMetrics:
    """What this process took to the kvstore. Names are `deepinfer_<role>_store_*`."""

    def __init__(self, metrics: Metrics, role: str) -> None:
        self._records = metrics.counter(f"{role}_store_records", "Records that were written for the kvstore", "result")
        self._bytes = metrics.counter(f"{role}_store_written_bytes", "Bytes written for the kvstore")
        text = "Sets of sealed blocks that were offered to the kvstore"
        self._offers = metrics.counter(f"{role}_store_offers", text, "result")

    def records(self, stored: int, rejected: int) -> None:
        """`rejected`: the kvstore did not find what was sealed."""
        self._records.labels("stored").inc(stored)
        self._records.labels("rejected").inc(rejected)

    def written(self, size_bytes: int) -> None:
        self._bytes.inc(size_bytes)

    def offered(self, result: str) -> None:
        """`result`: stored, known (nothing of it was wanted), absent (no kvstore), timeout, or an error's code."""
        self._offers.labels(result).inc()


_BATCH_TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)


class StepMetrics:
    """What each engine step took and computed; told from the engine's thread."""

    def __init__(self, metrics: Metrics, role: str) -> None:
        self._seconds = metrics.histogram(f"{role}_step_seconds", "Time of one engine step")
        text = "Tokens that one engine step computed"
        self._tokens = metrics.histogram(f"{role}_batch_tokens", text, buckets=_BATCH_TOKENS)

    def observe(self, step: Step) -> None:
        self._seconds.observe(step.seconds)
        self._tokens.observe(step.tokens)


def export_quarantine(metrics: Metrics, role: str, landings: LandingPool, layout: Layout) -> None:
    """Exports `deepinfer_<role>_kv_blocks_quarantined`: landings, not the engine's blocks, are what a writer in doubt
    can still reach, so the figure is their memory in units of KV blocks.
    """

    def blocks() -> float:
        stats = landings.stats()
        return stats.quarantined * stats.slab_bytes / layout.block_bytes

    text = "KV blocks' worth of landing memory whose writer may still write"
    metrics.gauge(f"{role}_kv_blocks_quarantined", text).set_function(blocks)


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
    ("store_offers_held", "Sets of sealed blocks held until they are stored", lambda stats: stats.offers),
    ("store_waiting_bytes", "Bytes of blocks and anchors that wait to be stored", lambda stats: stats.offers_bytes),
    ("store_offers_refused", "Offers beyond the bounds of the queue since start", lambda stats: stats.offers_refused),
    ("store_offers_late", "Offers that waited for too long since start", lambda stats: stats.offers_late),
    ("store_offers_taken_back", "Offers whose memory a request needed", lambda stats: stats.offers_taken_back),
)


def export_engine(metrics: Metrics, role: str, stats: Callable[[], EngineStats]) -> None:
    """Exports the newest engine statistics as `deepinfer_<role>_*`."""
    for name, text, read in _GAUGES:
        metrics.gauge(f"{role}_{name}", text).set_function(_reading(read, stats))


def _reading(read: Callable[[EngineStats], float], stats: Callable[[], EngineStats]) -> Callable[[], float]:
    return lambda: float(read(stats()))
