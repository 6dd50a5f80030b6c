"""The choice of kernels: what auto takes, and which explicit choices are refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kernels import KernelError, choose, choose_name
from kernels.cpu.compile import cache_folder
from kernels.cuda import driver


def test_auto_takes_the_cpu_kernels_and_says_so() -> None:
    assert choose("auto").name == "cpu"
    assert choose_name("auto") == "cpu"


def test_an_unknown_choice_names_those_that_exist() -> None:
    with pytest.raises(KernelError, match="choose one of auto, reference, cpu, triton, cuda"):
        choose("fast")


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Two GPUs of this compute capability."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)


def test_on_a_gpu_auto_takes_triton_and_the_cpu_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (8, 9))
    with pytest.raises(KernelError, match="the device is cuda:1"):
        choose_name("cpu", device="cuda:1")
    assert choose_name("auto", device="cuda:1") == "triton"
    assert choose("reference", device="cuda").device.type == "cuda"


def test_on_hopper_auto_takes_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton comes with the extras 'dev' and 'gpu'")
    pretend(monkeypatch, (9, 0))
    monkeypatch.setattr(driver, "has_nvrtc", lambda: True)
    ops = choose("auto", device="cuda")
    assert (ops.name, ops.device.type) == ("cuda", "cuda")


def test_two_engines_choices_share_no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton comes with the extras 'dev' and 'gpu'")
    from kernels.cuda import indexer_top_k

    pretend(monkeypatch, (9, 0))
    monkeypatch.setattr(driver, "has_nvrtc", lambda: True)
    monkeypatch.setattr(indexer_top_k, "workspace_of", lambda _device: object())
    first, second = (choose("cuda", device="cuda", batch_invariant=invariant).index_topk for invariant in (False, True))
    places = [one.keywords["workspace_on"] for one in (first, second)]
    device = torch.device("cuda")
    assert places[0](device) is places[0](device)
    assert places[0](device) is not places[1](device)


def test_cuda_is_refused_where_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (10, 0))
    with pytest.raises(KernelError, match=r"cuda:1 is of compute capability 10\.0.*choose kernels=reference or auto"):
        choose("cuda", device="cuda:1")
    pretend(monkeypatch, (9, 0))
    monkeypatch.setattr(driver, "has_nvrtc", lambda: False)
    with pytest.raises(KernelError, match="pip install nvidia-cuda-nvrtc"):
        choose("cuda", device="cuda")
    assert choose_name("auto", device="cuda") == "triton"


@pytest.mark.parametrize("kernels", ["triton", "cuda"])
def test_kernels_of_a_gpu_are_refused_without_one(kernels: str) -> None:
    with pytest.raises(KernelError, match=f"{kernels} kernels cannot run here: the device is cpu"):
        choose(kernels)


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


@pytest.mark.parametrize(("capability", "kernels"), [((9, 0), "cuda"), ((8, 9), "triton")])
def test_kernels_of_a_gpu_are_batch_invariant_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kernels: str
) -> None:
    pytest.importorskip("triton", reason="triton comes with the extras 'dev' and 'gpu'")
    pretend(monkeypatch, capability)
    monkeypatch.setattr(driver, "has_nvrtc", lambda: True)
    fast, invariant = (choose(device="cuda", batch_invariant=asked) for asked in (False, True))
    assert (fast.batch_invariant, invariant.batch_invariant) == (False, True)
    assert fast.name == invariant.name == kernels and fast.linear is not invariant.linear
    with pytest.raises(KernelError, match="stored weights are not batch invariant"):
        choose(kernels, "cuda", batch_invariant=True, stored=True)


def test_records_are_kept_by_the_backends_that_read_them_alone() -> None:
    assert choose("reference", records=True).records
    assert not choose("reference").records
    with pytest.raises(KernelError, match=r"the cpu kernels read and write no published records; choose kv_cache=rows"):
        choose("auto", records=True)


def test_no_advice_leads_to_kernels_that_read_no_records() -> None:
    with pytest.raises(KernelError) as refused:
        choose("reference", batch_invariant=True, records=True)
    assert refused.value.fix == "choose kernels=cuda on a Hopper GPU, or batch_invariant=False"
