"""The Hopper kernel of products of many tokens against float64: hostile operands, experts, every tile, graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.cuda.gemm_choice import Large
from kernels.cuda.gemm_large import gemm_large
from kernels.cuda.gemm_pack import pack_fp4
from kernels.reference.gemm import Fp4Weights, Fp8Weights
from kernels.testing.gemm import Case, assert_case, make_case, make_contiguous

CUDA = torch.device("cuda")
_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _HOPPER, reason="needs a Hopper GPU")]
TILES = [Large(rows, share) for rows in (64, 96, 128, 176, 192) for share in (1, 2)]
TILES += [Large(128, share, 2) for share in (1, 2)]


def runner(large: Large) -> Callable[[Case], torch.Tensor]:
    def run(case: Case) -> torch.Tensor:
        output = case.output()
        weights = pack_fp4(case.weights) if isinstance(case.weights, Fp4Weights) else case.weights
        gemm_large(case.activations, weights, case.counts, case.experts, output, large)
        return output

    return run


@pytest.mark.parametrize("large", TILES, ids=str)
def test_every_tile_equals_float64_and_gives_the_same_bits(large: Large) -> None:
    case = make_case("fp8 128", 1, 1300, 1112, 1280, CUDA, 1)
    assert_case(case, runner(large))
    assert torch.equal(runner(large)(case), runner(TILES[0])(case))


HOSTILE = [(form, large) for form in ("fp8 128", "fp8 32") for large in (Large(192), Large(128), Large(128, 2, 2))]


@pytest.mark.parametrize(("form", "large"), [("fp8 128", Large(176, 2)), *HOSTILE], ids=str)
def test_hostile_operands_equal_float64(form: str, large: Large) -> None:
    assert_case(make_case(form, 5, 500, 2112, 1152, CUDA, 3, hostile=True), runner(large))
    assert_case(make_contiguous(form, [130, 0, 1, 128, 700, 0, 300], 1040, 1024, CUDA, 3), runner(large))


@pytest.mark.parametrize("large", [Large(128, 2, 2, fp4=True), Large(192, fp4=True)], ids=str)
def test_fp4_weights_equal_float64(large: Large) -> None:
    assert_case(make_case("fp4", 5, 500, 2112, 1152, CUDA, 3, hostile=True), runner(large))
    assert_case(make_contiguous("fp4", [130, 0, 1, 128, 700, 0, 300], 1088, 1024, CUDA, 3), runner(large))


@pytest.mark.parametrize("form", ["fp8 128", "fp4"])
def test_groups_that_fill_their_tiles_in_part_equal_float64(form: str) -> None:
    large, counts = Large(128, 2, 2, fp4=form == "fp4"), torch.tensor([64, 700, 0, 129, 257], device=CUDA)
    assert_case(make_case(form, 5, 704, 4096, 640, CUDA, 3, counts.to(torch.int32)), runner(large))
    assert_case(make_contiguous(form, [130, 257, 1, 128, 60, 5000, 65, 64], 4096, 640, CUDA, 3), runner(large))


def test_a_graph_of_the_kernel_gives_its_bits_and_a_launch_allocates_nothing() -> None:
    case, large = make_case("fp8 128", 1, 700, 2112, 1536, CUDA, 5), Large(176, 2)
    assert isinstance(case.weights, Fp8Weights)
    output, replayed = runner(large)(case), case.output()
    operands = (case.activations, case.weights, None, None, replayed, large)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    gemm_large(*operands)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm_large(*operands)
    replayed.fill_(torch.nan)
    graph.replay()
    assert torch.equal(replayed, output)
