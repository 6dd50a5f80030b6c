"""The Hopper kernel of block-scaled products against float64: hostile operands, experts, repeats, graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.cuda.gemm_choice import choose_stream
from kernels.cuda.gemm_pack import pack_fp4
from kernels.cuda.gemm_stream import gemm_stream
from kernels.reference.gemm import Activations, Fp4Weights, Fp8Weights
from kernels.testing.gemm import FORMATS, Case, assert_case, make_case, make_contiguous

CUDA = torch.device("cuda")
_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _HOPPER, reason="needs a Hopper GPU")]


def run_kernel(case: Case) -> torch.Tensor:
    output = case.output()
    weights = pack_fp4(case.weights) if isinstance(case.weights, Fp4Weights) else case.weights
    groups, capacity, rows = output.shape
    fp4 = isinstance(case.weights, Fp4Weights)
    grain = 128 if isinstance(case.weights, Fp4Weights) else case.weights.grain
    stream = choose_stream(rows, case.activations.codes.shape[2], groups, capacity, fp4, grain)
    gemm_stream(case.activations, weights, case.counts, case.experts, output, stream)
    return output


@pytest.mark.parametrize("form", FORMATS)
def test_kernel_equals_float64_on_a_gpu(form: str) -> None:
    for rows, channels in ((192, 128), (2112, 1152)):
        for tokens in (1, 5, 127):
            assert_case(make_case(form, 1, tokens, rows, channels, CUDA, tokens), run_kernel)
        for tokens in (33, 500):
            assert_case(make_case(form, 5, tokens, rows, channels, CUDA, tokens, hostile=True), run_kernel)


@pytest.mark.parametrize("form", FORMATS)
def test_experts_in_runs_equal_float64_on_a_gpu(form: str) -> None:
    assert_case(make_contiguous(form, [130, 0, 1, 128, 700, 0], 320, 1024, CUDA, 3), run_kernel)


def first(case: Case, tokens: int) -> Case:
    """The first tokens of a dense case."""
    padded = -(-tokens // 4) * 4
    codes = case.activations.codes[:, :tokens].contiguous()
    return replace(case, activations=Activations(codes, case.activations.scales[..., :padded].contiguous()))


@pytest.mark.parametrize("form", FORMATS[:2])
def test_a_token_has_the_same_bits_whatever_else_is_in_the_batch(form: str) -> None:
    case = make_case(form, 1, 128, 2112, 7168, CUDA, 5)
    output = run_kernel(case)
    for tokens in (1, 3, 17, 64, 65):
        assert torch.equal(run_kernel(first(case, tokens)), output[:, :tokens])


def test_a_graph_of_the_kernel_gives_its_bits_and_a_launch_allocates_nothing() -> None:
    case = make_case("fp8 128", 1, 128, 2112, 1536, CUDA, 5)
    assert isinstance(case.weights, Fp8Weights)
    operands = (case.activations, case.weights, None, None)
    stream, output, replayed = choose_stream(2112, 1536, 1, 128), run_kernel(case), case.output()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    gemm_stream(*operands, replayed, stream)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm_stream(*operands, replayed, stream)
    replayed.fill_(torch.nan)
    graph.replay()
    assert torch.equal(replayed, output)
