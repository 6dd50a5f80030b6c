"""What the KV link did can be read from its metrics."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import generate_latest

from fabric.errors import DataLoss, Unavailable
from fabric.kvlink import open_link
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.metered import MeteredLink, export_landing
from fabric.kvlink.slabs import Writer
from fabric.kvlink.verify import Placement
from fabric.telemetry.metrics import Metrics
from tests.support.link_peer import Pusher, sealed


async def test_pushes_failures_slabs_and_mismatches_are_counted():
    metrics = Metrics("prefill")
    writer = MeteredLink(open_link("inproc://", "writer", 1), metrics)
    target = open_link("inproc://", "target", 1)
    pool = LandingPool(target, 1 << 20, slab_bytes=1 << 16)
    export_landing(pool, metrics)
    pusher = Pusher(writer, seed=1)
    landing = pool.grant("t", 100_000)
    await pusher.push(landing, [70_000, 30_000], "t", 5.0)
    (wrong,) = sealed(2, [70_000])
    with pytest.raises(DataLoss):
        await pool.commit("t", [Placement(wrong, np.zeros(70_000, np.uint8))])
    await pool.commit("t", [Placement(sealed(1, [70_000])[0], np.zeros(70_000, np.uint8))])
    pool.release("t", Writer.UNKNOWN)
    await target.close()
    with pytest.raises(Unavailable):
        await pusher.push(landing, [10], "t", 5.0)
    await writer.close()
    text = generate_latest(metrics.registry).decode()
    for line in (
        "deepinfer_kv_transfer_bytes_total 100000.0",
        "deepinfer_kv_transfer_seconds_count 1.0",
        'deepinfer_kv_transfer_failures_total{reason="unavailable"} 1.0',
        'deepinfer_kv_landing_bytes{state="quarantined"} 131072.0',
        'deepinfer_kv_landing_bytes{state="free"} 917504.0',
        "deepinfer_kv_landing_quarantines_total 1.0",
        "deepinfer_kv_committed_bytes_total 70000.0",
        "deepinfer_kv_transfer_digest_mismatch_total 1.0",
        'deepinfer_build_info{name="kv_lane",value="inproc"} 1.0',
    ):
        assert line in text.splitlines()
