"""The gate's kernel on a GPU against float64: every kind of router, hostile logits, repeats and graphs."""

from __future__ import annotations

import pytest
import torch

from kernels.cuda.gate import gate
from kernels.reference.gate import GateOperands, GateSpec
from kernels.testing.gate import SPECS, assert_case, make_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def run_kernel(spec: GateSpec, given: GateOperands) -> tuple[torch.Tensor, torch.Tensor]:
    rows = len(given.logits)
    experts = torch.full((rows, spec.topk), -7, dtype=torch.int32, device="cuda")
    weights = torch.full((rows, spec.topk), torch.nan, device="cuda")
    gate(spec, given, experts, weights)
    return experts, weights


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("rows", [1, 127, 8192])
@pytest.mark.parametrize("name", SPECS)
def test_kernel_equals_float64_on_a_gpu(name: str, rows: int, hostile: bool) -> None:
    spec = SPECS[name]
    given = make_case(spec, rows, torch.device("cuda"), rows, hostile)
    assert_case(spec, given, lambda operands: run_kernel(spec, operands))


def test_kernel_has_the_same_bits_from_a_graph() -> None:
    spec = SPECS["sigmoid in groups"]
    given = make_case(spec, 50, torch.device("cuda"), 3)
    experts, weights = run_kernel(spec, given)
    replayed, replayed_weights = torch.zeros_like(experts), torch.zeros_like(weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gate(spec, given, replayed, replayed_weights)
    graph.replay()
    assert torch.equal(replayed, experts) and torch.equal(replayed_weights, weights)
