"""Expert choice from logits: its definition, and the CUDA source run on the CPU and compiled for GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.cuda.driver import has_nvrtc
from kernels.cuda.gate import ROWS_A_BLOCK, SOURCE, THREADS, compile_for, defines_for, parameters_of
from kernels.errors import KernelError
from kernels.reference.gate import GateOperands, GateSpec, Score, gate
from kernels.testing.emulated import EmulatedKernel, has_compiler
from kernels.testing.gate import SPECS, assert_case, make_case

CPU = torch.device("cpu")


def run_reference(spec: GateSpec, given: GateOperands) -> tuple[torch.Tensor, torch.Tensor]:
    return gate(spec, given)


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_reference_in_fp32_is_the_reference_in_fp64(name: str, hostile: bool) -> None:
    spec = SPECS[name]
    assert_case(spec, make_case(spec, 203, CPU, 1, hostile), lambda given: run_reference(spec, given))


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.skipif(not has_compiler(), reason="needs g++")
def test_source_run_on_the_cpu_equals_fp64(name: str, hostile: bool, tmp_path: Path) -> None:
    spec = SPECS[name]
    kernel = EmulatedKernel(SOURCE, "gate", defines_for(spec), tmp_path)

    def run(given: GateOperands) -> tuple[torch.Tensor, torch.Tensor]:
        rows = len(given.logits)
        experts = torch.full((rows, spec.topk), -7, dtype=torch.int32)
        weights = torch.full((rows, spec.topk), torch.nan)
        kernel.launch(-(-rows // ROWS_A_BLOCK), THREADS, parameters_of(spec, given, experts, weights))
        return experts, weights

    assert_case(spec, make_case(spec, 41, CPU, 2, hostile), run)
    assert_case(spec, replace(make_case(spec, 41, CPU, 2, hostile), replicas=None, replica_counts=None), run)


@pytest.mark.parametrize("spoil", ["expert", "weight", "bits"])
def test_the_check_finds_what_it_is_for(spoil: str) -> None:
    spec, calls = SPECS["softplus"], []

    def wrong(given: GateOperands) -> tuple[torch.Tensor, torch.Tensor]:
        experts, weights = gate(spec, given)
        calls.append(1)
        if spoil == "expert":
            experts[5] = experts[5].flip(0)
        if spoil == "weight":
            weights[3, 2] *= 1.001
        if spoil == "bits" and len(calls) == 2:
            weights[3, 2] += 1e-6
        return experts, weights

    with pytest.raises(AssertionError):
        assert_case(spec, make_case(spec, 64, CPU, 2), wrong)


def test_replicas_take_turns_by_row() -> None:
    spec = GateSpec(4, 1, Score.SIGMOID)
    logits = torch.tensor([[0.0, 9.0, 0.0, 0.0]]).repeat(5, 1)
    replicas = torch.tensor([[0, -1, -1], [1, 4, 5], [2, -1, -1], [3, -1, -1]], dtype=torch.int32)
    counts = torch.tensor([1, 3, 1, 1], dtype=torch.int32)
    experts, weights = gate(spec, GateOperands(logits, replicas=replicas, replica_counts=counts))
    assert experts.flatten().tolist() == [1, 4, 5, 1, 4]
    assert torch.allclose(weights, torch.ones(5, 1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bias": torch.zeros(3)}, "bias is"),
        ({"logits": torch.zeros(2, 9)}, "logits is"),
        ({"table": torch.zeros(5, 8, dtype=torch.int32)}, "hash router"),
        ({"replicas": torch.zeros(256, 1, dtype=torch.int32)}, "without their counts"),
    ],
)
def test_operands_no_kernel_takes_are_refused(change: dict[str, torch.Tensor], reason: str) -> None:
    spec = SPECS["sigmoid in groups"]
    given = GateOperands(**{"logits": torch.zeros(2, 256), **change})
    with pytest.raises(KernelError, match=reason):
        gate(spec, given)


def test_routers_that_do_not_fit_are_refused() -> None:
    for experts, topk, groups, kept in ((64, 65, 1, 1), (64, 8, 7, 7), (64, 9, 8, 1), (64, 8, 2, 3)):
        with pytest.raises(KernelError):
            GateSpec(experts, topk, Score.SIGMOID, groups, kept)


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC comes with the extras 'dev' and 'gpu'")
def test_kernel_compiles_ahead_without_spills(name: str, architecture: str) -> None:
    cubin, report = compile_for(SPECS[name], architecture)
    assert cubin
    assert "0 bytes spill stores" in report
