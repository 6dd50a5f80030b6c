"""What the KV link uses and did can be read from metrics."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import generate_latest

from fabric.errors import DataLoss
from fabric.kvlink import open_link
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.metered import export_landing, export_lane
from fabric.kvlink.slabs import Writer
from fabric.kvlink.verify import Placement
from fabric.telemetry.metrics import Metrics
from tests.support.link_peer import Pusher, sealed


async def test_lane_slabs_commits_and_mismatches_are_exported():
    metrics = Metrics("prefill")
    writer, target = open_link("inproc://", "writer", 1), open_link("inproc://", "target", 1)
    pool = LandingPool(target, 1 << 20, slab_bytes=1 << 16)
    export_landing(pool, metrics)
    export_lane(writer, metrics)
    await Pusher(writer, seed=1).push(pool.grant("t", 100_000), [70_000, 30_000], "t", 5.0)
    (wrong,) = sealed(2, [70_000])
    with pytest.raises(DataLoss):
        await pool.commit("t", [Placement(wrong, np.zeros(70_000, np.uint8))])
    await pool.commit("t", [Placement(sealed(1, [70_000])[0], np.zeros(70_000, np.uint8))])
    pool.release("t", Writer.UNKNOWN)
    await target.close()
    await writer.close()
    text = generate_latest(metrics.registry).decode()
    for line in (
        'deepinfer_kv_lane_info{kind="shared-memory",lane="inproc",transport="inproc"} 1.0',
        'deepinfer_kv_landing_bytes{state="quarantined"} 131072.0',
        'deepinfer_kv_landing_bytes{state="free"} 917504.0',
        "deepinfer_kv_landing_quarantines_total 1.0",
        "deepinfer_kv_committed_bytes_total 70000.0",
        "deepinfer_kv_transfer_digest_mismatch_total 1.0",
    ):
        assert line in text.splitlines()
