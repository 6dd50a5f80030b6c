"""The kernel of block-scaled products of many tokens: its choice of tiles, and its CUDA source run on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.cuda import gemm
from kernels.cuda.driver import has_nvrtc
from kernels.cuda.gemm_choice import PROCESSORS, Large, Stream, choose_cut, choose_large
from kernels.cuda.gemm_large import SOURCE, compile_for, defines_for, gemm_large, parameters_of
from kernels.cuda.gemm_pack import pack_fp4
from kernels.errors import KernelError
from kernels.reference.gemm import Fp4Weights, Fp8Weights
from kernels.testing.emulated import has_compiler
from kernels.testing.gemm import Case, assert_case, make_case, make_contiguous
from kernels.testing.gemm_emulated import emulate, tensor_map

CPU = torch.device("cpu")
SHAPES = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (64, 128), (200, 256))


@pytest.mark.parametrize("tokens", [65, 200, 512, 4096, 70_000])
def test_every_tile_fits_the_chip(tokens: int) -> None:
    for rows, channels in SHAPES:
        for groups in (1, 6, 256):
            large = choose_large(rows, channels, groups, tokens)
            assert large.passes == 1 or groups == 1 or not large.share  # a tile may have two experts
            assert large.stages >= 4
            assert large.shared_bytes <= 232_448 - 1024
            assert large.rows % 32 == 0 and large.tokens <= 256
            assert large.copied_rows <= 256 and large.copied_rows % 8 == 0  # what one copy takes, and whole swizzles
            blocks = large.blocks(groups, tokens, rows)
            assert 0 < blocks <= PROCESSORS and blocks % (2 if large.share else 1) == 0


def test_many_tokens_take_large_tiles_and_fp4_never_does() -> None:
    assert isinstance(choose_cut(7168, 2048, 1, 128), Stream)
    assert isinstance(choose_cut(7168, 2048, 1, 4096), Large)
    assert isinstance(choose_cut(4096, 7168, 32, 20), Stream)
    assert isinstance(choose_cut(4096, 7168, 4, 8192, grain=32), Large)
    assert isinstance(choose_cut(4096, 7168, 32, 8192, fp4=True), Stream)


CASES = {
    "weights shared by tokens of one expert, and not by those of two": (
        Large(160, share=True), make_contiguous("fp8 128", [5, 0, 130, 140], 328, 256, CPU, 4),
    ),
    "masked groups, weights shared, two passes": (
        Large(128, share=True, passes=2), make_case("fp8 128", 2, 131, 200, 384, CPU, 2, hostile=True),
    ),
    "two passes, tiles of two experts": (
        Large(128, passes=2), make_contiguous("fp8 128", [0, 130, 5, 3, 300], 136, 256, CPU, 4),
    ),
    "scales of 32 x 32": (Large(192), make_case("fp8 32", 2, 131, 200, 384, CPU, 2, hostile=True)),
    "a narrow tile, few tokens": (Large(96), make_case("fp8 128", 1, 37, 296, 640, CPU, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.skipif(not has_compiler(), reason="needs g++")
def test_source_run_on_the_cpu_equals_fp64(name: str, tmp_path: Path) -> None:
    large, case = CASES[name]
    assert isinstance(case.weights, Fp8Weights)
    cluster = 2 if large.share else 1
    kernel = emulate(SOURCE, defines_for(large, case.weights.grain), cluster, tmp_path, cluster)

    def run(given: Case) -> torch.Tensor:
        output = given.output()
        assert isinstance(given.weights, Fp8Weights)
        operands = (given.activations, given.weights, given.counts, given.experts, output)
        kernel.launch(cluster, large.threads, parameters_of(*operands, large, tensor_map))
        return output

    assert assert_case(case, run) < 2.5e-3


def test_a_tile_of_two_experts_is_refused() -> None:
    case = make_contiguous("fp8 128", [5, 130], 64, 128, CPU, 1)
    assert isinstance(case.weights, Fp8Weights)
    with pytest.raises(KernelError, match="two experts"):
        gemm_large(case.activations, case.weights, None, case.experts, case.output(), Large(128, True, 2))


def test_fp4_weights_are_refused() -> None:
    case = make_case("fp4", 1, 5, 64, 128, CPU, 1)
    assert isinstance(case.weights, Fp4Weights)
    with pytest.raises(KernelError, match="no FP4 weights"):
        gemm.gemm(case.activations, pack_fp4(case.weights), None, None, case.output(), Large(128))


@pytest.mark.parametrize(
    ("large", "grain"), [(Large(160), 32), (Large(192, True), 128), (Large(128, passes=2), 128)], ids=str
)
@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC comes with the extras 'dev' and 'gpu'")
def test_kernel_compiles_ahead_for_hopper_without_spills(large: Large, grain: int) -> None:
    cubin, report = compile_for(large, grain)
    assert cubin
    assert "0 bytes spill stores" in report
    assert "serialized" not in report  # products would wait for each other
    assert "setmaxnreg" not in report  # registers are traded
