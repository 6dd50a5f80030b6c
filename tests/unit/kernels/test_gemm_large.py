"""The kernel of block-scaled products of many tokens: its choice of tiles, and its CUDA source run on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.cuda import gemm
from kernels.cuda.driver import has_nvrtc
from kernels.cuda.gemm_choice import PROCESSORS, Large, Stream, choose_cut, choose_large
from kernels.cuda.gemm_large import SOURCE, compile_for, defines_for, parameters_of
from kernels.cuda.gemm_pack import PackedFp4, pack_fp4
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
            for grain, masked in ((128, False), (128, True), (32, False)):
                large = choose_large(rows, channels, groups, tokens, grain, masked)
                assert large.stages >= 4
                assert large.shared_bytes <= 232_448 - 1024
                assert large.rows % 16 == 0 and (grain == 128 or large.rows % 32 == 0)
                assert large.rows <= 256 and large.copied_tokens <= 256 and large.copied_tokens % 8 == 0  # of a copy
                blocks = large.blocks(groups, tokens, rows)
                assert 0 < blocks <= PROCESSORS and blocks % large.share == 0
        fp4 = choose_large(rows, channels, 32, tokens, masked=True, fp4=True)
        assert fp4.fp4 and fp4.stages >= 3 and fp4.shared_bytes <= 232_448 - 1024


def test_widths_fill_the_chip_in_whole_turns() -> None:
    tile = choose_large(2112, 7168, 1, 4096)  # 11 tiles of 192 by 32 would be 2.7 turns of three, 12 of 176 are 2.9
    assert tile.rows == 176
    assert choose_large(7168, 2048, 1, 4096) == Large(128, share=2, passes=2)


def test_no_more_blocks_are_launched_than_shorten_the_last_turn() -> None:
    large = Large(128, share=2, passes=2)
    assert large.blocks(1, 4096, 7168) == 128  # 16 x 28 pairs of tiles: seven turns of 64 clusters, as of 66
    assert large.blocks(1, 4096, 3072) == 128  # 16 x 12 pairs: three turns of 64
    assert large.blocks(1, 4096, 24_576) == 132  # 16 x 96 pairs: 23 turns, and the 18 that are left by halves
    assert large.blocks(1, 512, 4096) == 128  # 2 x 16 pairs: all by halves
    assert large.blocks(6, 1024, 4096) == 132  # tokens are counted later


def test_masked_groups_take_tiles_of_256_tokens_and_runs_do_where_they_are_long() -> None:
    assert choose_large(4096, 7168, 32, 192, masked=True).tokens == 256
    assert choose_large(4096, 7168, 6, 1024, masked=True).tokens == 256
    assert choose_large(4096, 7168, 32, 256).tokens == 128  # most tiles of 256 would have two experts
    assert choose_large(4096, 7168, 8, 4096).tokens == choose_large(4096, 7168, 4, 8192).tokens == 256
    assert choose_large(7168, 2048, 4, 8192).tokens == 128


def test_many_tokens_take_large_tiles() -> None:
    assert isinstance(choose_cut(7168, 2048, 1, 128), Stream)
    assert isinstance(choose_cut(7168, 2048, 1, 4096), Large)
    assert isinstance(choose_cut(4096, 7168, 32, 20), Stream)
    assert isinstance(choose_cut(4096, 7168, 4, 8192, grain=32), Large)
    assert choose_cut(4096, 7168, 32, 192, fp4=True, masked=True) == Large(128, share=2, passes=2, fp4=True)
    assert isinstance(choose_cut(4096, 7168, 32, 20, fp4=True, masked=True), Stream)


# A tile, operands, and clusters.
CASES = {
    "activations shared, tiles of two experts": (
        Large(176, share=2), make_contiguous("fp8 128", [5, 0, 130, 140], 328, 256, CPU, 4), 1,
    ),
    "masked groups, activations shared, two passes": (
        Large(128, share=2, passes=2), make_case("fp8 128", 2, 131, 200, 384, CPU, 2, hostile=True), 1,
    ),
    "two passes, activations shared, tiles of two experts, the last turn by halves": (
        Large(128, share=2, passes=2), make_contiguous("fp8 128", [0, 130, 5, 3, 300], 136, 256, CPU, 4), 2,
    ),
    "masked groups of one half and of none, the last turn by halves": (
        Large(128, share=2, passes=2),
        make_case("fp8 128", 3, 300, 136, 256, CPU, 2, torch.tensor([300, 0, 70], dtype=torch.int32)), 2,
    ),
    "fp4, two passes, masked groups": (
        Large(128, share=2, passes=2, fp4=True), make_case("fp4", 2, 131, 192, 256, CPU, 2, hostile=True), 1,
    ),
    "fp4, tiles of two experts": (
        Large(64, fp4=True), make_contiguous("fp4", [5, 130, 3], 128, 256, CPU, 4), 1,
    ),
    "scales of 32 x 32": (Large(192), make_case("fp8 32", 2, 131, 200, 384, CPU, 2, hostile=True), 1),
    "tiles of three scales": (Large(176), make_case("fp8 128", 1, 131, 728, 256, CPU, 2, hostile=True), 1),
    "a narrow tile, few tokens": (Large(96), make_case("fp8 128", 1, 37, 296, 640, CPU, 2), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.skipif(not has_compiler(), reason="needs g++")
def test_source_run_on_the_cpu_equals_fp64(name: str, tmp_path: Path) -> None:
    large, case, clusters = CASES[name]
    blocks, weights = clusters * large.share, packed(case)
    kernel = emulate(SOURCE, defines_for(large, weights.grain), blocks, tmp_path, large.share)

    def run(given: Case) -> torch.Tensor:
        output = given.output()
        operands = (given.activations, weights, given.counts, given.experts, output)
        kernel.launch(blocks, large.threads, parameters_of(*operands, large, tensor_map))
        return output

    assert assert_case(case, run) < 2.5e-3


def packed(case: Case) -> Fp8Weights | PackedFp4:
    """Weights as the kernel takes them."""
    return pack_fp4(case.weights) if isinstance(case.weights, Fp4Weights) else case.weights


def test_weights_of_another_format_than_the_cut_are_refused() -> None:
    fp4, fp8 = (make_case(form, 1, 5, 64, 128, CPU, 1) for form in ("fp4", "fp8 128"))
    for case, large in ((fp4, Large(128)), (fp8, Large(128, 2, 2, fp4=True))):
        with pytest.raises(KernelError, match="not of this cut's format"):
            gemm.gemm(case.activations, packed(case), None, None, case.output(), large)


def test_rows_that_end_within_a_square_of_scales_are_refused() -> None:
    with pytest.raises(KernelError, match="176 rows end within a square of 32"):
        defines_for(Large(176), grain=32)


@pytest.mark.parametrize(
    ("large", "grain"),
    [
        (Large(192), 32), (Large(176), 128), (Large(192, 2), 128), (Large(128, 2, 2), 128),
        (Large(128, 2, 2, fp4=True), 128),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC comes with the extras 'dev' and 'gpu'")
def test_kernel_compiles_ahead_for_hopper_without_spills(large: Large, grain: int) -> None:
    cubin, report = compile_for(large, grain)
    assert cubin
    assert "0 bytes spill stores" in report
    assert "serialized" not in report  # products would wait for each other
    assert "setmaxnreg" not in report  # registers are traded
