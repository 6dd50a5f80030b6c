"""The lane is named for what it is; one that was expected and is missing is an error, or a loud warning by setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabric.errors import StartError, Unavailable
from fabric.kvlink import open_link
from fabric.kvlink.lanes import Expectation, LaneKind, kinds


@pytest.mark.parametrize(
    ("lane", "found"),
    [
        ("cma/memory+tcp/lo", ["shared-memory", "tcp"]),
        ("rc_mlx5/mlx5_0:1+sysv/memory", ["rdma", "shared-memory"]),
        ("cuda_ipc/cuda+tcp/eth0", ["cuda-ipc", "tcp"]),
        ("mapped/memory+cma/memory+tcp/lo", ["shared-memory", "tcp"]),
        ("mapped/memory", ["shared-memory"]),
        ("tcp", ["tcp"]),
        ("unconnected", []),
    ],
)
def test_kinds_are_named_the_fastest_first(lane, found):
    assert kinds(lane) == tuple(LaneKind(kind) for kind in found)


@pytest.mark.parametrize(
    ("options", "may"),
    [
        ({}, True),
        ({"mapped": "on"}, True),
        ({"mapped": "off"}, False),
        ({"expect": "shared-memory"}, True),
        ({"expect": "rdma"}, False),
        ({"expect": "rdma", "mapped": "on"}, False),
    ],
)
def test_memory_is_mapped_unless_that_would_hide_what_is_expected(options, may):
    assert Expectation.parse(options).may_map is may


def host(path: Path, rdma: str = "", nvidia: bool = False) -> Path:
    if rdma:
        port = path / "sys/class/infiniband/mlx5_0/ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(rdma)
    if nvidia:
        (path / "proc/driver/nvidia").mkdir(parents=True)
        (path / "proc/driver/nvidia/version").touch()
    return path


@pytest.mark.parametrize(
    ("kind", "offered", "rdma", "nvidia", "comes"),
    [
        ("rdma", "tcp/eth0", "4: ACTIVE", False, True),
        ("rdma", "tcp/eth0", "1: DOWN", False, False),
        ("rdma", "tcp/eth0+rc_mlx5/mlx5_0:1", "", False, True),
        ("cuda-ipc", "cma/memory", "", True, True),
        ("cuda-ipc", "cma/memory", "", False, False),
        ("shared-memory", "cma/memory+tcp/lo", "", False, True),
        ("shared-memory", "tcp/lo", "4: ACTIVE", True, False),
    ],
)
def test_what_cannot_come_to_be_is_said_at_start(tmp_path, kind, offered, rdma, nvidia, comes):
    root = host(tmp_path, rdma, nvidia)
    strict = Expectation.parse({"expect": kind})
    if comes:
        strict.check_start(offered, root)
        return
    with pytest.raises(StartError, match=f"no {kind} lane") as caught:
        strict.check_start(offered, root)
    assert "UCX_TLS" in caught.value.fix


class Said:
    """A logger that keeps its warnings: where lines go depends on who configured logs first."""

    def __init__(self) -> None:
        self.warnings: list[tuple[str, str]] = []

    def warning(self, event: str, reason: str, fix: str) -> None:
        self.warnings.append((event, reason))


def test_a_missing_lane_can_be_a_warning_by_setting(monkeypatch):
    said = Said()
    monkeypatch.setattr("fabric.kvlink.lanes._log", said)
    lenient = Expectation.parse({"expect": "rdma", "missing": "warn"})
    lenient.check_start("tcp/lo", Path("/nonexistent"))
    lenient.check_peer("tcp/lo", "decode-1")
    assert [event for event, _ in said.warnings] == ["EXPECTED LANE IS MISSING"] * 2
    assert said.warnings[1][1] == "the lane to decode-1 is tcp/lo, not rdma"


def test_a_peer_reached_by_another_lane_is_unavailable():
    with pytest.raises(Unavailable, match="the lane to decode-1 is tcp/lo, not rdma"):
        Expectation.parse({"expect": "rdma"}).check_peer("tcp/lo", "decode-1")
    Expectation().check_peer("tcp/lo", "decode-1")


@pytest.mark.parametrize("query", ["expect=fast", "missing=maybe", "lane=rdma", "expect"])
async def test_an_unknown_option_of_a_transport_is_a_start_error(query):
    with pytest.raises(StartError, match="no option of a transport"):
        open_link(f"ucx://?{query}", "x", 1)


@pytest.mark.parametrize("url", ["tcp://127.0.0.1?expect=shared-memory", "inproc://?expect=tcp"])
async def test_every_transport_is_held_to_what_was_expected(url):
    with pytest.raises(StartError, match="lane can come to be"):
        open_link(url, "x", 1)
