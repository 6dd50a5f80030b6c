"""What the KV link did, as metrics. Knows names and reasons; the bytes pass through untouched."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fabric.errors import ServiceError
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.link import Link, Notice, Region, Write
from fabric.records import LinkAddress
from fabric.telemetry.metrics import Metrics


class MeteredLink:
    """A link that counts bytes, time and failures of its pushes, and exports the lane once it is known."""

    def __init__(self, link: Link, metrics: Metrics) -> None:
        self._link = link
        self._metrics = metrics
        self._bytes = metrics.counter("kv_transfer_bytes", "KV bytes pushed")
        self._seconds = metrics.histogram("kv_transfer_seconds", "Time of one push")
        self._failures = metrics.counter("kv_transfer_failures", "Pushes that failed", "reason")
        self._lane = ""

    @property
    def address(self) -> LinkAddress:
        return self._link.address

    @property
    def lane(self) -> str:
        return self._link.lane

    def register(self, buffer: Any) -> Region:
        return self._link.register(buffer)

    async def push(
        self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes = b"", timeout_s: float
    ) -> None:
        started = time.monotonic()
        try:
            await self._link.push(address, writes, notify=notify, timeout_s=timeout_s)
        except ServiceError as error:
            self._failures.labels(error.code).inc()
            raise
        self._bytes.inc(sum(write.nbytes for write in writes))
        self._seconds.observe(time.monotonic() - started)
        if self._lane != self._link.lane:
            self._lane = self._link.lane
            self._metrics.build_info("kv_lane", self._lane)

    def expecting(self) -> AbstractContextManager[None]:
        return self._link.expecting()

    def notices(self) -> AsyncIterator[Notice]:
        return self._link.notices()

    async def close(self) -> None:
        await self._link.close()


class _LandingCollector(Collector):
    """Reads a pool's counters when they are asked for."""

    def __init__(self, pool: LandingPool) -> None:
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        stats = self._pool.stats()
        slabs = GaugeMetricFamily("deepinfer_kv_landing_bytes", "Landing memory by state", labels=["state"])
        for state in ("free", "granted", "quarantined", "retired"):
            slabs.add_metric([state], getattr(stats, state) * stats.slab_bytes)
        yield slabs
        for name, text, value in (
            ("kv_landing_quarantines", "Landings given up with a writer in doubt", stats.quarantines_total),
            ("kv_landing_retirements", "Landings whose writer stayed silent", stats.retirements_total),
            ("kv_committed_bytes", "KV bytes verified and copied into place", stats.committed_bytes_total),
            ("kv_transfer_digest_mismatch", "Extents whose digest differed", stats.digest_mismatches_total),
        ):
            yield CounterMetricFamily(f"deepinfer_{name}", text, value=value)


def export_landing(pool: LandingPool, metrics: Metrics) -> None:
    """Exports the pool's memory by state and its totals."""
    metrics.registry.register(_LandingCollector(pool))
