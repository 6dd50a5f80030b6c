"""Metrics of a prefill worker beyond the engine's. Knows names and meanings."""

from __future__ import annotations

from fabric.telemetry.metrics import Metrics
from services.worker.telemetry import TransferMetrics


class PrefillMetrics(TransferMetrics):
    """KV pushed to decode and read from the kvstore."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._hits = metrics.counter("prefill_store_hit_blocks", "Blocks read from the kvstore and verified")
        self._hints = metrics.counter("prefill_store_hints", "Hints to another store that were followed", "result")
        self._prefetches = metrics.counter("prefill_prefetches", "Hints that a prompt will come", "result")
        self._rising = metrics.counter("prefill_prefetch_blocks", "Blocks that the kvstore brought up for such hints")
        self._misses = metrics.counter("prefill_store_misses", "Prompts that found nothing to read", "reason")

    def hint(self, result: str) -> None:
        """A store named another one. `result`: useful where that one holds more, stale otherwise."""
        self._hints.labels(result).inc()

    def prefetch(self, result: str, blocks: int) -> None:
        """`result`: asked, failed, or dropped where too many came at a time."""
        self._prefetches.labels(result).inc()
        self._rising.inc(blocks)

    def store_hit(self, blocks: int) -> None:
        self._hits.inc(blocks)

    def store_miss(self, reason: str) -> None:
        """`reason`: absent, timeout, engine, or the code of the error that was met."""
        self._misses.labels(reason).inc()
