"""The choice of kernels: what auto takes, and which explicit choices are refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kernels import KernelError, choose, choose_name
from kernels.cpu.compile import cache_folder


def test_auto_takes_the_cpu_kernels_and_says_so() -> None:
    assert choose("auto").name == "cpu"
    assert choose_name("auto") == "cpu"


def test_an_unknown_choice_names_those_that_exist() -> None:
    with pytest.raises(KernelError, match="choose one of auto, reference, cpu, triton"):
        choose("cuda")


def test_on_a_gpu_auto_takes_triton_and_the_cpu_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(KernelError, match="the device is cuda:1"):
        choose_name("cpu", device="cuda:1")
    assert choose_name("auto", device="cuda:1") == "triton"
    assert choose("reference", device="cuda").device.type == "cuda"


def test_triton_is_refused_without_a_gpu() -> None:
    with pytest.raises(KernelError, match="triton kernels cannot run here: the device is cpu"):
        choose("triton")


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:0", "", "cuda:9"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(KernelError, match=r"choose (device=)?cpu"):
        choose("auto", device=device)


def test_batch_invariance_is_refused_where_it_does_not_hold() -> None:
    with pytest.raises(KernelError, match="not batch invariant"):
        choose("reference", batch_invariant=True)
    assert choose("auto", batch_invariant=True).batch_invariant


def test_choosing_the_reference_does_not_import_numba() -> None:
    program = "import sys, kernels; kernels.choose('reference'); sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_compiled_kernels_are_cached_under_the_sources_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder().startswith("/somewhere/deepinfer/kernels-")
