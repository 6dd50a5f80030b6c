"""Block-scaled FP8 products: their definition, quantization, packing, and the CUDA source run on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.cuda.driver import has_nvrtc
from kernels.cuda.gemm_choice import PROCESSORS, Stream, choose_stream
from kernels.cuda.gemm_pack import PackedFp4, pack_fp4
from kernels.cuda.gemm_stream import SOURCE, compile_for, defines_for, parameters_of
from kernels.errors import KernelError
from kernels.reference.gemm import (
    Fp4Weights,
    Fp8Weights,
    check_operands,
    dequantize,
    dequantize_activations,
    gemm,
    quantize_activations,
    quantize_fp4,
    quantize_fp8,
    written,
)
from kernels.testing.emulated import has_compiler
from kernels.testing.gemm import FORMATS, Case, assert_case, make_case, make_contiguous
from kernels.testing.gemm_emulated import emulate, tensor_map

CPU = torch.device("cpu")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run_reference(case: Case) -> torch.Tensor:
    output = case.output()
    found = gemm(case.activations, case.weights, case.counts, case.experts).to(torch.bfloat16)
    valid = written(case.activations, case.counts, case.experts)
    output[valid] = found[valid]
    return output


@pytest.mark.parametrize("form", FORMATS)
def test_product_is_the_sum_over_channels_of_codes_times_their_scales(form: str) -> None:
    case = make_case(form, 2, 3, 40, 256, CPU, seed=1)
    found = gemm(case.activations, case.weights)
    weights = dequantize(case.weights)
    for group, token, row in ((0, 0, 0), (1, 2, 39), (0, 1, 33)):
        total = 0.0
        for channel in range(256):
            scale = float(case.activations.scales[group, channel // 128, token])
            total += float(case.activations.codes[group, token, channel]) * scale * float(weights[group, row, channel])
        assert found[group, token, row].item() == pytest.approx(total, rel=1e-12)


def test_activations_lose_a_sixteenth_of_a_value_at_most_and_zeros_stay() -> None:
    x = drawn(2, 5, 256) * torch.tensor([1e-3, 1.0, 30.0, 1e4, 0.0])[:, None]
    found = quantize_activations(x)
    assert found.scales.shape == (2, 2, 8)
    assert not found.scales[..., 5:].any()
    back = dequantize_activations(found)
    step = found.scales[..., :5].mT.repeat_interleave(128, 2) * 2.0**-10  # half the distance of subnormals
    assert bool(((back - x).abs() <= x.abs() / 16 + step).all())
    assert not back[:, 4].any()


@pytest.mark.parametrize("grain", [128, 32])
def test_fp8_weights_share_a_scale_in_squares(grain: int) -> None:
    w = drawn(1, 200, 256) * torch.exp2(torch.arange(200.0) / 8)[:, None]
    found = quantize_fp8(w, grain)
    assert found.grain == grain
    assert found.scales.shape == (1, -(-200 // grain), 256 // grain)
    assert found.codes.float().abs().max() <= 448
    largest = (
        torch.nn.functional.pad(w.abs(), (0, 0, 0, -200 % grain)).view(-1, grain, 256 // grain, grain).amax((1, 3))
    )
    wide = largest.repeat_interleave(grain, 0)[:200].repeat_interleave(grain, 1)
    assert bool(((dequantize(found)[0] - w[0]).abs() <= w[0].abs() / 16 + wide * 2.0**-17).all())


def test_fp4_weights_take_the_nearest_of_eight_sizes() -> None:
    w = torch.tensor([0.0, 0.2, 0.3, 0.8, -1.2, 1.6, 2.4, -2.6, 3.4, 3.6, 4.9, -5.1, 6.0, -6.0]).repeat(1, 1, 32)
    found = dequantize(quantize_fp4(w[..., : 14 * 32].contiguous()))
    nearest = [0.0, 0.0, 0.5, 1.0, -1.0, 1.5, 2.0, -3.0, 3.0, 4.0, 4.0, -6.0, 6.0, -6.0]
    assert found[0, 0, :14].tolist() == nearest


@pytest.mark.parametrize("form", FORMATS)
def test_reference_rounded_to_bf16_passes_the_check(form: str) -> None:
    for hostile in (False, True):
        assert assert_case(make_case(form, 3, 9, 128, 256, CPU, 2, hostile=hostile), run_reference) < 2e-3


@pytest.mark.parametrize("spoil", ["bits", "behind", "value", "all"])
def test_the_check_finds_what_it_is_for(spoil: str) -> None:
    calls = []

    def wrong(case: Case) -> torch.Tensor:
        output = run_reference(case)
        calls.append(1)
        if spoil == "bits" and len(calls) == 2:
            output[2, 1, 0] += 1
        if spoil == "behind":
            output[0, 0, 0] = 0  # no token of the first group counts
        if spoil == "value":
            output[2, 1, 5] += output[2, 1].abs().max() / 16
        if spoil == "all":
            output[2] *= 1.01
        return output

    with pytest.raises(AssertionError):
        assert_case(make_case("fp8 128", 3, 9, 128, 256, CPU, 2, hostile=True), wrong)


SHAPES = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (64, 128), (200, 256))


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("groups", [1, 6, 256])
@pytest.mark.parametrize("tokens", [1, 7, 20, 64, 128, 200, 4096])
def test_every_choice_fits_the_chip(tokens: int, groups: int, fp4: bool) -> None:
    for rows, channels in SHAPES:
        for grain in (32, 128):
            stream = choose_stream(rows, channels, groups, tokens, fp4, grain)
            assert stream.stages(fp4) >= 3 * stream.depth_groups - 2
            assert stream.shared_bytes(fp4) * stream.resident <= 232_448 - 1024 * stream.resident
            assert stream.threads <= 1024
            ring = stream.stages(fp4) * (stream.stage_bytes(fp4) - 4 * stream.tokens - 16)
            assert not stream.once or stream.partial_bytes <= ring  # sums lie where the ring was
            assert 128 % stream.tokens == 0  # where experts' runs begin
            assert stream.split == 1 or (stream.once and stream.split <= 4)
            assert stream.split <= max(channels // 128, 1)
            blocks = stream.blocks(groups, tokens, rows)
            assert blocks % stream.split == 0 and (stream.once or blocks <= PROCESSORS * stream.resident)


STREAMS = (Stream(8, 1, 2, 1, once=True), Stream(16, 2, 1, 1, once=False))
RUNS = [(form, stream) for form in FORMATS for stream in STREAMS]


@pytest.mark.parametrize(("form", "stream"), [*RUNS, ("fp8 128", Stream(128, 2, 1, 1, once=False))])
@pytest.mark.skipif(not has_compiler(), reason="needs g++")
def test_source_run_on_the_cpu_equals_fp64(form: str, stream: Stream, tmp_path: Path) -> None:
    fp4, grain = form == "fp4", 32 if form == "fp8 32" else 128
    if stream.tokens == 128:
        case = make_contiguous(form, [5, 0, 130], 264, 256, CPU, 4)
    elif stream.once:
        case = make_case(form, 1, 7, 128 if fp4 else 104, 384, CPU, 4)
    else:
        case = make_case(form, 2, 11, 128 if fp4 else 104, 384, CPU, 4, hostile=True)
    blocks = 2
    kernel = emulate(
        SOURCE, defines_for(stream, fp4, grain, dense=case.counts is None and stream.once), blocks, tmp_path
    )

    def run(given: Case) -> torch.Tensor:
        weights = pack_fp4(given.weights) if isinstance(given.weights, Fp4Weights) else given.weights
        output = given.output()
        parameters = parameters_of(given.activations, weights, given.counts, given.experts, output, stream, tensor_map)
        kernel.launch(blocks, stream.threads, parameters)
        return output

    assert assert_case(case, run) < 2.5e-3


CLUSTERS = (
    (Stream(8, 1, 2, 3, once=True), 5),
    (Stream(32, 1, 2, 2, once=True), 25),
    (Stream(64, 2, 1, 3, once=True), 41),
    (Stream(64, 1, 2, 2, once=True), 64),
    (Stream(16, 1, 3, 1, once=True, deepest=9), 9),
    (Stream(64, 1, 3, 1, once=True, deepest=9, fetchers=3), 50),
)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("stream", "tokens"), CLUSTERS)
@pytest.mark.skipif(not has_compiler(), reason="needs g++")
def test_blocks_that_share_channels_run_on_the_cpu_equal_fp64(
    stream: Stream, tokens: int, form: str, tmp_path: Path
) -> None:
    fp4, grain = form == "fp4", 32 if form == "fp8 32" else 128
    case = make_case(form, 1, tokens, 128 if fp4 else 72, 128 * 7, CPU, 4)
    blocks = stream.blocks(1, tokens, 128 if fp4 else 72)
    kernel = emulate(SOURCE, defines_for(stream, fp4, grain, dense=True), blocks, tmp_path, stream.split)

    def run(given: Case) -> torch.Tensor:
        weights = pack_fp4(given.weights) if isinstance(given.weights, Fp4Weights) else given.weights
        output = given.output()
        kernel.launch(blocks, stream.threads, parameters_of(given.activations, weights, None, None, output, stream,
                                                            tensor_map))  # fmt: skip
        return output

    assert assert_case(case, run) < 2.5e-3


def test_packed_fp4_keeps_every_bit() -> None:
    weights = Fp4Weights(
        torch.randint(0, 256, (2, 64, 128), generator=torch.Generator().manual_seed(0), dtype=torch.uint8),
        torch.randint(120, 131, (2, 64, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8),
    )
    packed = pack_fp4(weights)
    assert packed.chunks.shape == (2, 1, 2, 4352)
    assert packed.rows == 64 and packed.channels == 256
    other = replace(weights, codes=weights.codes ^ 1)
    changed = (pack_fp4(other).chunks != packed.chunks).sum()
    assert int(changed) >= weights.codes.numel() / 2  # no code shares its place with another
    assert not bool((pack_fp4(other).chunks[..., 4096:] != packed.chunks[..., 4096:]).any())


def test_fp4_weights_no_kernel_takes_are_refused() -> None:
    codes, scales = torch.full((1, 64, 64), 0x33, dtype=torch.uint8), torch.full((1, 64, 4), 127, dtype=torch.uint8)
    far, nan = scales.clone(), scales.clone()
    far[0, 5, 1], nan[0, 5, 1] = 115, 255
    with pytest.raises(KernelError, match="differ by more"):
        pack_fp4(Fp4Weights(codes, far))
    with pytest.raises(KernelError, match="NaN"):
        pack_fp4(Fp4Weights(codes, nan))
    with pytest.raises(KernelError, match="FP4 weights"):
        pack_fp4(Fp4Weights(codes[:, :40], scales[:, :40]))
    empty = codes.clone()
    empty[0, 5, 16:32] = 0x80  # both zeros: the scale of 32 zeros does not matter
    assert isinstance(pack_fp4(Fp4Weights(empty, far)), PackedFp4)


def test_rows_of_a_chunk_have_one_exponent_unless_their_scales_lie_too_far_apart() -> None:
    codes, scales = torch.full((1, 128, 64), 0x33, dtype=torch.uint8), torch.full((1, 128, 4), 127, dtype=torch.uint8)
    scales[0, 5], scales[0, 70] = 116, 124  # 2**11 and 2**3 below
    near = pack_fp4(Fp4Weights(codes, scales))
    exponents = near.chunks[..., 4096:].contiguous().view(torch.int32) >> 23
    assert near.even and exponents.unique().tolist() == [127 - 6]
    scales[0, 5] = 115
    far = pack_fp4(Fp4Weights(codes, scales))
    exponents = far.chunks[..., 4096:].contiguous().view(torch.int32) >> 23
    assert not far.even and exponents[0, 0].unique().tolist() == [115 - 6, 127 - 6]
    assert exponents[0, 1].unique().tolist() == [127 - 6]


def test_operands_no_kernel_takes_are_refused() -> None:
    case = make_case("fp8 128", 2, 5, 128, 256, CPU, 1)
    activations, weights, output = case.activations, case.weights, case.output()
    counts = torch.ones(2, dtype=torch.int32)
    check_operands(activations, weights, counts, None, output)
    assert isinstance(weights, Fp8Weights)
    wrong = [
        (
            (replace(activations, scales=activations.scales[..., :5]), weights, counts, None, output),
            "activations.scales is",
        ),
        ((activations, replace(weights, scales=weights.scales[:, :, :1]), counts, None, output), "weights.scales is"),
        ((activations, weights, None, torch.zeros(5, dtype=torch.int32), output), "2 groups of tokens"),
        ((activations, weights, counts.long(), None, output), "counts is"),
        ((activations, weights, counts, None, output.float()), "output is"),
        ((replace(activations, codes=activations.codes[..., :200]), weights, counts, None, output), "pad rows to 8"),
    ]
    for operands, reason in wrong:
        with pytest.raises(KernelError, match=reason):
            check_operands(*operands)


KINDS = [(Stream(64, 2, 1, 1, once=False), fp4, grain) for fp4, grain in ((False, 128), (False, 32), (True, 128))]
WIDEST = [(choose_stream(*shape, 1, 128, grain=grain), False, grain) for shape in SHAPES[1:4:2] for grain in (128, 32)]


@pytest.mark.parametrize(("stream", "fp4", "grain"), [*KINDS, *WIDEST])
@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC comes with the extras 'dev' and 'gpu'")
def test_kernel_compiles_ahead_for_hopper_without_spills(stream: Stream, fp4: bool, grain: int) -> None:
    cubin, report = compile_for(stream, fp4, grain, dense=stream.once)
    assert cubin
    assert "0 bytes spill stores" in report
    assert "serialized" not in report  # products would wait for each other
