"""Tile kernels and dispatch on a GPU against their definitions, and from graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.dispatch import Alone, make_plan
from kernels.testing import dispatch, engram, kv_record, mhc, sampling, tile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("name", tile.SPECS)
@pytest.mark.parametrize("rows", [1, 1031])
def test_casts_and_swiglu_equal_their_definition(name: str, rows: int) -> None:
    tile.check_casts(CUDA, rows, (512, 7168), (name,))
    tile.check_swiglu(CUDA, max(rows, 5), 2048, (name,))


@pytest.mark.parametrize("name", ["e4m3 per 32, fp32", "e4m3 per 64, e8m0", "e2m1 per 32, e8m0"])
def test_norms_equal_their_definition(name: str) -> None:
    tile.check_norms(CUDA, 9, (512, 7168), (name,))


def test_blocks_and_ropes_equal_their_definition() -> None:
    tile.check_block_casts(CUDA, 500, 1008)
    tile.check_ropes(CUDA, 33, 128, 64, 32)
    tile.check_ropes(CUDA, 33, 5, 512, 32)
    tile.check_turns(CUDA, 33, 128, 64, 32, "cuda.rope")
    tile.check_turns(CUDA, 33, 19, 64, 32, "cuda.rope")


@pytest.mark.parametrize("name", ["e4m3 per 128, fp32", "e4m3 per 32, e8m0"])
@pytest.mark.parametrize("rows", [5, 1031])
def test_cuda_sources_equal_their_definition(name: str, rows: int) -> None:
    tile.check_casts(CUDA, rows, (384, 7168), (name,), "cuda.cast", wide=False)
    for inner in (1408, 2048):
        tile.check_swiglu(CUDA, rows, inner, (name,), "cuda.swiglu")
    tile.check_norms(CUDA, rows, (2304, 7168), (name,), "cuda.rms_norm")


def test_whatever_is_chosen_equals_its_definition() -> None:
    tile.check_casts(CUDA, 77, (384, 7168), by="tile")
    tile.check_swiglu(CUDA, 77, 2048, by="tile")
    tile.check_norms(CUDA, 77, (512, 7168), by="tile")
    tile.check_turns(CUDA, 77, 128, 64, 32, "tile")
    tile.check_turns(CUDA, 77, 5, 128, 32, "tile")
    mhc.check_project(CUDA, 77, 20_480, "tile")


@pytest.mark.parametrize("by", ["triton.mhc_project", "cuda.mhc_project"])
@pytest.mark.parametrize(("rows", "width"), [(130, 28_672), (2049, 28_672), (700, 7168), (3, 16_384)])
def test_mhc_projection_equals_its_definition(rows: int, width: int, by: str) -> None:
    mhc.check_project(CUDA, rows, width, by)


@pytest.mark.parametrize("shape", [(133, 1024, 5), (33, 7168, 16), (1001, 4096, 32)])
def test_mhc_pre_equals_its_definition(shape: tuple[int, int, int]) -> None:
    mhc.check_pre(CUDA, *shape, "cuda.mhc_pre")


def test_mhc_post_and_engram_equal_their_definition() -> None:
    mhc.check_post(CUDA, 133, 7168)
    mhc.check_sinkhorn(CUDA, 1000)
    engram.check_hash(CUDA, 3001)
    engram.check_gather(CUDA, 501)
    engram.check_gate(CUDA, 1200, 5120)


@pytest.mark.parametrize("kind", kv_record.Packed)
@pytest.mark.parametrize("page_tokens", [1, 64])
def test_records_equal_their_definition(kind: kv_record.Packed, page_tokens: int) -> None:
    kv_record.check_pack(CUDA, 101, page_tokens, (kind,))


def test_sampling_equals_its_definition() -> None:
    sampling.check_sampling(CUDA, 42, 129_280, 4096, 16)
    sampling.check_sampling(CUDA, 84, 1000, 256, 4)


def test_dispatch_equals_its_definition() -> None:
    from kernels.triton.dispatch import OPS

    dispatch.check_plans(OPS, CUDA, 4099, 6, 60)
    dispatch.check_plans(OPS, CUDA, 1001, 8, 256)
    dispatch.check_permutation(OPS, CUDA, 300, 8, 256, 7168)
    dispatch.check_round(OPS, Alone(), CUDA, 100, 1024)


def test_launches_capture_and_replay_with_the_same_bits() -> None:
    from kernels.triton.dispatch import plan
    from kernels.triton.sampling import sample
    from kernels.triton.swiglu import swiglu_cast

    spec = tile.SPECS["e4m3 per 128, fp32"]
    x = tile.make_rows(64, 1024, CUDA, 1)
    codes, scales = tile.places(spec, 64, 512, CUDA)
    logits, rows = sampling.make_case(32, 5000, CUDA, 1, hostile=False)
    tokens = torch.zeros(32, dtype=torch.int32, device=CUDA)
    chosen = dispatch.make_chosen(64, 4, 16, CUDA, 1, hostile=True)
    planned = make_plan(64, 4, 16, 64 * 4 + 16 * 7, CUDA)
    work: tuple[Callable[[], None], ...] = (
        lambda: swiglu_cast(x, 10.0, None, spec, codes, scales),
        lambda: sample(logits, rows, tokens),
        lambda: plan(chosen, 0, 8, planned),
    )
    for each in work:
        each()
    outputs = (codes.view(torch.uint8), scales, tokens, planned.places, planned.sources)
    first = [output.clone() for output in outputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in work:
            each()
    for output in outputs:
        output.zero_()
    graph.replay()
    assert all(torch.equal(output, wanted) for output, wanted in zip(outputs, first, strict=True))
