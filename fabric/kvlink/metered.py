"""The KV link's lane and landing memory as metrics, read when they are asked for. Knows names and meanings."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fabric.kvlink.landing import LandingPool
from fabric.kvlink.lanes import kinds
from fabric.kvlink.link import Link
from fabric.telemetry.metrics import Metrics


class _LaneCollector(Collector):
    def __init__(self, link: Link) -> None:
        self._link = link

    def collect(self) -> Iterable[Metric]:
        lane = self._link.lane
        text = "1, with what carries KV: the lanes, and the kind that bulk prefers"
        family = GaugeMetricFamily("deepinfer_kv_lane_info", text, labels=["transport", "lane", "kind"])
        transport = self._link.address.url.partition(":")[0]
        family.add_metric([transport, lane, next(iter(kinds(lane)), "none")], 1)
        yield family


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


def export_lane(link: Link, metrics: Metrics) -> None:
    """Exports what carries KV, from now on and whenever it changes."""
    metrics.registry.register(_LaneCollector(link))


def export_landing(pool: LandingPool, metrics: Metrics) -> None:
    """Exports the pool's memory by state and its totals."""
    metrics.registry.register(_LandingCollector(pool))
