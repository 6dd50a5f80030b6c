"""Metrics of a kvstore. Knows names and meanings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial

from fabric.telemetry.metrics import Metrics
from services.kvstore.announcer import Announcer
from services.kvstore.fill import Filling
from services.kvstore.hints import Hints
from services.kvstore.nvme.tier import NvmeCounts, NvmeTier
from services.kvstore.prefetch import PrefetchCounts


class StoreMetrics:
    """Hits, misses by reason, damage and size."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._hits = metrics.counter("kvstore_hits", "Lookups that found a usable prefix")
        self._hit_blocks = metrics.counter("kvstore_hit_blocks", "Blocks of those prefixes")
        self._misses = metrics.counter("kvstore_misses", "Lookups and reads that found less than was asked", "reason")
        self._corrupt = metrics.counter("kvstore_corrupt", "Records that were damaged in the store and dropped")
        self._tier_bytes = metrics.gauge("kvstore_tier_bytes", "Bytes of records", "tier")
        self._rejected = metrics.counter("kvstore_rejected", "Offered records that did not match their digests")

    def watch(self, used_bytes: Callable[[], int], records: Callable[[], int], reading: Callable[[], int]) -> None:
        """Exports the store's own counts."""
        text = "Bytes of DRAM that reads keep in place until they are sent"
        self._metrics.gauge("kvstore_reading_bytes", text).set_function(reading)
        self._tier_bytes.labels("dram").set_function(used_bytes)
        self._metrics.gauge("kvstore_records", "Records").set_function(records)

    def watch_index(self, hints: Hints, announcer: Announcer, filling: Filling) -> None:
        """Exports what the index was told and asked."""
        text = "How often the index did not answer since start"
        lost = self._metrics.gauge("kvstore_index_lost_total", text)
        lost.set_function(lambda: hints.lost + announcer.counts.lost)
        text = "Hints to another instance that lookups got since start"
        self._metrics.gauge("kvstore_index_hints_total", text).set_function(lambda: hints.given)
        text = "Keys that wait to be told to the index"
        self._metrics.gauge("kvstore_index_waiting", text).set_function(lambda: announcer.waiting)
        text = "What the index was told since start: keys, and passes over everything held"
        told = self._metrics.gauge("kvstore_index_events_total", text, "event")
        for event in ("announced", "withdrawn", "reannounced", "passes"):
            told.labels(event).set_function(partial(getattr, announcer.counts, event))
        text = "Bytes of blocks that another instance held and that came here since start"
        self._metrics.gauge("kvstore_fill_bytes_total", text).set_function(lambda: filling.counts.filled_bytes)
        text = "Writers that were sent to the instance that holds their prefix since start"
        self._metrics.gauge("kvstore_fill_redirected_total", text).set_function(lambda: filling.counts.redirected)

    def watch_nvme(self, nvme: NvmeTier) -> None:
        """Exports what the tier on disk counts."""
        self._tier_bytes.labels("nvme").set_function(lambda: nvme.used)
        self._metrics.gauge("kvstore_nvme_records", "Records on disk").set_function(lambda: len(nvme))
        text = "Bytes in DRAM that wait for the disk"
        self._metrics.gauge("kvstore_nvme_waiting_bytes", text).set_function(lambda: nvme.waiting_bytes)
        events = self._metrics.gauge(
            "kvstore_nvme_events_total", "What happened to records on disk since start", "event"
        )
        for event in fields(NvmeCounts):
            events.labels(event.name).set_function(partial(getattr, nvme.counts, event.name))

    def watch_prefetches(self, counts: PrefetchCounts) -> None:
        """Exports what became of hints to bring prefixes up."""
        text = "Hints to bring a prefix up since start, and blocks that came"
        events = self._metrics.gauge("kvstore_prefetch_events_total", text, "event")
        for event in fields(PrefetchCounts):
            events.labels(event.name).set_function(partial(getattr, counts, event.name))

    def hit(self, blocks: int) -> None:
        self._hits.inc()
        self._hit_blocks.inc(blocks)

    def miss(self, reason: str) -> None:
        """`reason`: absent, no_anchor, left (between Lookup and Get) or corrupt."""
        self._misses.labels(reason).inc()

    def corrupt(self) -> None:
        self._corrupt.inc()

    def rejected(self, count: int) -> None:
        self._rejected.inc(count)
