"""Transport truth with real processes: a lane that must be there and is not stops the start, or is shouted about."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli import running
from cli.doctor import Health
from engine.families.v4.tiny import TinySpec, write_tiny
from tests.support import procs

STORE = ("--discovery", "memory://lanes", "--index", "memory://", "--memory-mb", "8", "--landing-mb", "8")


@pytest.fixture(autouse=True)
def _no_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host without RDMA, whatever this one has: UCX may use nothing else."""
    monkeypatch.setenv("UCX_TLS", "tcp,sm,self")
    if any("ACTIVE" in state.read_text() for state in Path("/sys/class/infiniband").glob("*/ports/*/state")):
        pytest.skip("this host has an RDMA port: nothing is missing")


@pytest.mark.parametrize("service", ["prefill", "decode", "kvstore"])
def test_an_expected_lane_that_cannot_be_is_a_start_error_before_any_work(tmp_path: Path, service: str) -> None:
    model = () if service == "kvstore" else ("--model", str(write_tiny(tmp_path / "model", TinySpec())))
    options = STORE if service == "kvstore" else STORE[:2]
    command = procs.python("-m", f"services.{service}", *options, *model, "--transport", "ucx://?expect=rdma")
    with procs.spawn(command, tmp_path / "log") as process:
        assert process.wait(60.0) == 1
        log = process.tail()
    *_, last = log.strip().splitlines()
    assert last.startswith("error: --transport: no rdma lane can come to be on this host")
    assert "UCX_NET_DEVICES" in last and "missing=warn" in last
    assert "model loaded" not in log


@pytest.fixture
def tolerant(tmp_path: Path) -> Iterator[tuple[procs.Process, dict[str, str]]]:
    """A worker that is told to go on without RDMA, and its ready line."""
    with procs.service("kvstore", tmp_path, *STORE, "--transport", "ucx://?expect=rdma&missing=warn") as ready:
        yield ready


def test_with_missing_warn_it_starts_says_so_loudly_and_doctor_and_metrics_see_it(
    tolerant: tuple[procs.Process, dict[str, str]],
) -> None:
    process, ready = tolerant
    assert "EXPECTED LANE IS MISSING" in process.tail()
    with urllib.request.urlopen(f"http://{ready['metrics']}/metrics", timeout=5) as reply:
        metrics = reply.read().decode()
    assert 'deepinfer_kv_lane_info{kind="none",lane="unconnected",transport="ucx"} 1.0' in metrics
    [service] = running.of_discovery(f"static://kvstore={ready['address']}", "ucx://?expect=rdma&missing=warn")
    finding = running.checks([service])[service.name]()
    assert finding.health is Health.OK and "no KV has moved yet, rdma is expected" in finding.detail
    process.terminate()
    assert process.wait() == 0, "native libraries have the last word"
