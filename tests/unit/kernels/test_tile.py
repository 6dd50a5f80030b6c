"""Casts, SwiGLU, norms, rope, mHC, Engram, records, sampling: definitions, kernels in the interpreter and compiled."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from engine.families.v41.config import EngramConfig
from engine.families.v41.hashing import EngramHash
from engine.sampling.random import uniforms
from kernels.errors import KernelError
from kernels.operands import HyperSite
from kernels.reference import engram, hyper, kv_record, mhc, sampling
from kernels.reference.cast import CastSpec, Code, Scale, cast_blocks, cast_rows, check_cast, decode, scale_values
from kernels.reference.kv_record import Packed
from kernels.reference.linear import pack
from kernels.reference.sparse_decode import RecordKind, unpack
from kernels.testing.kv_record import make_operands
from kernels.testing.mhc import make_site, make_streams
from kernels.testing.sampling import make_case
from kernels.testing.tile import SPECS, assert_cast, make_rows
from tests.unit.families.v41.material import DATA, tensors

CPU = torch.device("cpu")
# Each in a process of its own: triton decides when it is imported whether it interprets.
INTERPRETED = ("tile", "mhc", "engram", "kv_record", "dispatch", "sampling")


@pytest.mark.parametrize("name", INTERPRETED)
def test_kernels_equal_their_definition_in_tritons_interpreter(name: str) -> None:
    pytest.importorskip("triton", reason="triton comes with the extras 'dev' and 'gpu'")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", f"kernels.testing.{name}"]
    subprocess.run(command, check=True, timeout=280, env=environment)


@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_compile_ahead_without_spills(capability: int) -> None:
    pytest.importorskip("triton", reason="triton comes with the extras 'dev' and 'gpu'")
    from kernels.triton.variants import compile_variant, variants

    taken = {variant.name: compile_variant(variant, capability) for variant in variants()}
    assert len(taken) > 30
    # Sampling has 1,024 threads, which leaves 64 registers to each; two of them are kept elsewhere once a row.
    assert {name: found.stack for name, found in taken.items() if found.stack} in ({}, {"sampling": 8})


@pytest.mark.parametrize(
    ("values", "scales", "spec"),
    [
        ("fp8_block32", "fp8_scale", SPECS["e4m3 per 32, e8m0"]),
        ("fp4_block32_e8m0", "fp4_e8m0_scale", SPECS["e2m1 per 32, e8m0"]),
        ("fp4_block16_e4m3", "fp4_e4m3_scale", SPECS["e2m1 per 16, e4m3"]),
    ],
)
def test_casts_have_the_published_formats_bit_for_bit(values: str, scales: str, spec: CastSpec) -> None:
    cases = tensors(DATA / "quant-cases.safetensors")
    codes, stored = cast_rows(cases["x"], spec)
    assert torch.equal(scale_values(stored), cases[scales].double())
    assert torch.equal(decode(codes, stored, spec), cases[values].double())


@pytest.mark.parametrize("name", SPECS)
def test_a_cast_is_one_rounding_away_and_the_check_finds_two(name: str) -> None:
    spec = SPECS[name]
    x = make_rows(40, 256, CPU, 1, hostile=True)
    codes, scales = cast_rows(x, spec)
    assert_cast(codes, scales, spec, x.double())
    finite = scale_values(scales).isfinite().all(1).nonzero()
    spoiled = codes.clone().view(torch.uint8)
    row = int(finite[-1])
    at = int(codes.view(torch.uint8)[row].argmax())
    spoiled[row, at] -= 2
    with pytest.raises(AssertionError):
        assert_cast(spoiled.view(codes.dtype), scales, spec, x.double())


def test_blocks_share_a_scale() -> None:
    x = torch.ones(130, 200)
    x[129, 199] = 896.0
    codes, scales = cast_blocks(x, 128, Scale.FP32)
    assert torch.equal(scales, torch.tensor([[1 / 448, 1 / 448], [1 / 448, 2.0]]))
    assert codes[129, 128:].float().tolist() == [0.5] * 71 + [448.0]


def test_mhc_in_steps_is_the_hyper_connection() -> None:
    site, x = make_site(256, CPU, 3), make_streams(9, 256, CPU, 4)
    norm = torch.rand(256) + 0.5
    whole = HyperSite(pack(site.mix[None], False), site.base, site.scale, norm, 4, 20, 1e-6, 1e-6)
    wide = x.float()
    expected = hyper.hyper_pre(wide, whole)
    z, squares = mhc.project(x.flatten(1), site.mix, 4)
    mixed, weights, comb = mhc.coefficients(z, squares, 4 * 256, site)
    for found, wanted in (
        (mhc.collapse(x, mixed, norm, 1e-6), expected[0]),
        (weights, expected[1]),
        (comb, expected[2]),
    ):
        assert torch.allclose(found.float(), wanted, atol=3e-3)  # the other rounds its weight to bf16
    block = torch.randn(9, 256)
    found, wanted = mhc.post(x, block, weights, comb), hyper.hyper_post(wide, block, weights.float(), comb.float())
    assert bool(((found - wanted).abs() <= 1e-6 * wanted.abs().amax((1, 2), keepdim=True)).all())


def test_hashed_rows_are_the_engines() -> None:
    config = EngramConfig((1, 14), (0, 0), 1000, 4, 8, 256, 500, 2)
    hashing = EngramHash(config, 2)
    recent = np.random.default_rng(0).integers(-1, 500, (60, 4))
    primes, offsets, multipliers = (
        torch.from_numpy(each) for each in (hashing.primes, hashing.offsets, hashing.multipliers)
    )
    found = engram.hash_rows(torch.from_numpy(recent), multipliers, primes, offsets, 2)
    assert np.array_equal(found.numpy(), hashing.rows(recent))


@pytest.mark.parametrize("kind", [RecordKind.V4, RecordKind.V32, RecordKind.V41_WINDOW, RecordKind.V41_ENTRY])
def test_packed_records_are_those_that_attention_reads(kind: RecordKind) -> None:
    packed = Packed[kind.name]
    x, slots, pages, norm, turn = make_operands(packed, 23, 5, CPU, 2)
    kv_record.pack(packed, x, slots, pages, 5, norm, turn)
    kept = slots >= 0
    found = unpack(kind, pages, 5)[slots[kept]]
    wanted = kv_record.prepared(packed, x, norm, turn)[kept]
    worst = 0.27 if kind is RecordKind.V41_ENTRY else 0.05  # of the largest channel: half a step of E2M1, of E4M3
    assert bool(((found - wanted).abs() <= worst * wanted.abs().amax(1, keepdim=True)).all())


def test_a_draws_point_is_the_engines() -> None:
    seeds, draws = [0, 1, 2**63 + 5, 2**64 - 1], [0, 7, 2**33, 1]
    points = [sampling.fraction(seed, draw) / 2.0**64 for seed, draw in zip(seeds, draws, strict=True)]
    assert points == uniforms(seeds, draws).tolist()


def test_truncations_keep_the_fewest_and_ties() -> None:
    logits, rows = make_case(1, 6, CPU, 0, hostile=False)
    logits[0] = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0, 0.0]).log()
    rows.temperature[0] = 1.0
    for count, share, least, kept in ((3, 1.0, 0.0, 4), (0, 0.75, 0.0, 2), (0, 0.76, 0.0, 4), (0, 1.0, 0.3, 2)):
        rows.top_k[0], rows.top_p[0], rows.min_p[0] = count, share, least
        assert int((sampling.kept_weights(logits[0], rows, 0) > 0).sum()) == kept


def test_operands_no_kernel_takes_are_refused() -> None:
    spec = SPECS["e4m3 per 128, fp32"]
    codes, scales = torch.zeros(2, 256, dtype=torch.float8_e4m3fn), torch.zeros(2, 2)
    for x in (torch.zeros(2, 200), torch.zeros(2, 256, dtype=torch.float64), torch.zeros(3, 256)):
        with pytest.raises(KernelError):
            check_cast(x, spec, codes, scales)
    for code, group, scale in ((Code.E4M3, 48, Scale.FP32), (Code.E4M3, 16, Scale.E4M3)):
        with pytest.raises(KernelError):
            CastSpec(code, group, scale)
