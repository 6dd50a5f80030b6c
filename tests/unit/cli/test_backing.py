"""What the doctor says of GPUs: the kernels that would serve there, or why the fastest would not."""

from pathlib import Path
from typing import Any

import pytest

from cli import backing
from cli.doctor import Health
from fabric.errors import StartError
from kernels import available

HOPPER = {"name": "NVIDIA H200", "auto": "cuda", "missing": {"cpu": "the device is cuda:0"}}
OLDER = {"name": "NVIDIA A100", "auto": "triton", "missing": {"cuda": "cuda:1 is of compute capability 8.0"}}


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(backing, "_DRIVER", tmp_path / "nvidiactl")


def told(monkeypatch: pytest.MonkeyPatch, devices: dict[str, Any]) -> backing.Finding:
    answer = {"torch": "2.11.0", "devices": {"cpu": {"auto": "cpu", "missing": {}}, **devices}, "rules": []}
    monkeypatch.setattr(backing, "call_engine", lambda *_, **__: answer)
    return backing.gpu_kernels()


def test_a_hopper_gpu_is_served_by_its_own_kernels(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(monkeypatch, {"cuda:0": HOPPER})
    assert found.health is Health.OK and found.detail.startswith("cuda:0: cuda")


def test_why_the_fastest_kernels_are_missing_is_said(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(monkeypatch, {"cuda:0": HOPPER, "cuda:1": OLDER})
    assert found.health is Health.WARN
    assert found.detail == "cuda:0: cuda; cuda:1: triton" and "compute capability 8.0" in found.fix


def test_a_torch_without_cuda_is_named(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(monkeypatch, {})
    assert found.health is Health.WARN and "torch 2.11.0 sees no GPU" in found.detail


def test_a_machine_without_torch_or_without_a_gpu_is_no_failure(
    driver: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: str, **__: float) -> None:
        raise StartError("this needs torch", field="torch", fix="pip install it")

    monkeypatch.setattr(backing, "call_engine", refuse)
    assert backing.gpu_kernels().health is Health.WARN
    monkeypatch.setattr(backing, "_DRIVER", tmp_path / "nothing")
    assert backing.gpu_kernels().health is Health.OK


def test_what_is_available_names_a_reason_for_every_backend_that_is_not() -> None:
    facts = available.available()["devices"]["cpu"]
    assert facts["auto"] == "cpu" and facts["missing"]["cuda"] == "the device is cpu"
