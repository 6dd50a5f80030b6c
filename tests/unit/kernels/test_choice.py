"""The choice of kernels: what auto takes, and which explicit choices are refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kernels import KernelError, choose, choose_name
from kernels.cpu.compile import cache_folder


def test_auto_takes_the_cpu_kernels_and_says_so() -> None:
    assert choose("auto").name == "cpu"
    assert choose_name("auto") == "cpu"


def test_an_unknown_choice_names_those_that_exist() -> None:
    with pytest.raises(KernelError, match="choose one of auto, reference, cpu"):
        choose("cuda")


def test_cpu_kernels_are_refused_for_another_device() -> None:
    with pytest.raises(KernelError, match="the device is cuda"):
        choose("cpu", device="cuda")
    assert choose("auto", device="cuda").name == "reference"


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
