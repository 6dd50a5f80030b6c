"""Tile kernels in CUDA C++, their sources run on a CPU: they equal their definitions. All compile without spills."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.cuda import cast, mhc_pre, mhc_project, rms_norm, rope, swiglu
from kernels.cuda.driver import has_nvrtc
from kernels.cuda.tile_plan import Plan
from kernels.errors import KernelError
from kernels.testing import mhc, tile
from kernels.testing.emulated import has_compiler
from kernels.testing.tile_emulated import emulate

CPU = torch.device("cpu")
FP32, E8M0 = "e4m3 per 128, fp32", "e4m3 per 32, e8m0"
SPECS = {name: tile.SPECS[name] for name in (FP32, E8M0)}
SHARED_BYTES = 232_448  # a block's, at most
emulated = pytest.mark.skipif(not has_compiler(), reason="needs g++")


@emulated
def test_casts_equal_their_definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, tmp_path)
    tile.check_casts(CPU, 45, (384,), (E8M0, FP32), "cuda.cast", wide=False)


@emulated
@pytest.mark.parametrize(("inner", "name"), [(256, FP32), (1408, E8M0)])
def test_swiglu_equals_its_definition(inner: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, tmp_path)
    tile.check_swiglu(CPU, 11, inner, (name,), "cuda.swiglu")


@emulated
def test_norms_equal_their_definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, tmp_path)
    tile.check_norms(CPU, 9, (2304,), (E8M0,), "cuda.rms_norm")


@emulated
def test_rope_equals_its_definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, tmp_path)
    tile.check_turns(CPU, 7, 19, 64, 32, "cuda.rope")
    tile.check_turns(CPU, 2, 64, 64, 32, "cuda.rope")  # two blocks a row


@emulated
@pytest.mark.parametrize("shape", [(23, 512, 5), (2, 1280, 16)])
def test_mhc_pre_equals_its_definition(
    shape: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch, tmp_path)
    mhc.check_pre(CPU, *shape, "cuda.mhc_pre")


@emulated
@pytest.mark.parametrize(("rows", "processors"), [(9, 4), (150, 2)])
def test_mhc_projection_equals_its_definition(
    rows: int, processors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch, tmp_path, processors)
    mhc.check_project(CPU, rows, 2048, "cuda.mhc_project")


PLANS = {
    "swiglu": swiglu.plan_for(2048, True, True, SPECS[FP32], False),
    "swiglu of few rows": swiglu.plan_for(2048, True, False, SPECS[E8M0], True),
    "cast": cast.plan_for(SPECS[E8M0]),
    "norm": rms_norm.plan_for(7168, False, True, None),
    "addition, norm and cast": rms_norm.plan_for(7168, True, False, SPECS[E8M0]),
    "rope": rope.plan_for(128, 64, inverse=True),
    "mhc pre": mhc_pre.plan_for(7168, 32, 20, False, False),
    "mhc pre and norm": mhc_pre.plan_for(5120, 32, 20, True, False),
    "mhc projection": mhc_project.plan_for(28_672, 64),
    "mhc projection of few rows": mhc_project.plan_for(20_480, 32),
}


@pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC")
@pytest.mark.parametrize("name", PLANS)
def test_plans_compile_without_spills_and_fit_the_chip(name: str) -> None:
    plan: Plan = PLANS[name]
    assert plan.shared_bytes <= SHARED_BYTES and plan.threads <= 1024 and plan.threads % 32 == 0
    _, log = plan.compile()
    assert "0 bytes spill stores" in log


def test_operands_these_kernels_do_not_take_are_refused() -> None:
    spec = SPECS[FP32]
    codes, scales = tile.places(spec, 4, 256, CPU)
    odd = torch.zeros(4 * 257, dtype=torch.bfloat16)[1:].as_strided((4, 256), (257, 1))
    for x in (odd, torch.zeros(4, 256)):
        with pytest.raises(KernelError):
            cast.parameters_of(x, spec, codes, scales)
    with pytest.raises(KernelError, match="cast to E4M3"):
        rms_norm.plan_for(512, False, True, tile.SPECS["e2m1 per 32, e8m0"])
