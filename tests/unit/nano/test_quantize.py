"""The stored number formats: exact, idempotent, within their error, in the published byte order."""

from __future__ import annotations

import pytest
import torch

from models.nano.quantize import (
    FP4_LEVELS,
    byte_exponents,
    exponent_bytes,
    fp4_codes,
    fp4_pack,
    fp4_round,
    fp4_unpack,
    fp4_values,
    fp8_pack,
    fp8_round,
    fp8_unpack,
    scale_exponent,
)


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 70), (3, 128, 256)])
def test_fp8_round_trip_is_exact_on_its_own_values_and_close_on_others(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.05
    once = fp8_round(weight)
    assert torch.equal(fp8_round(once), once)
    assert ((once - weight).abs() <= weight.abs() / 16 + 1e-5).all()


def test_fp4_round_trip_is_exact_on_its_own_values_and_to_the_nearest_level() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    once = fp4_round(weight)
    assert torch.equal(fp4_round(once), once)
    codes, exponent = fp4_codes(weight)
    scaled = torch.ldexp(weight.unflatten(-1, (-1, 32)), -exponent[..., None]).flatten(-2)
    nearest = (scaled.abs()[..., None] - torch.tensor(FP4_LEVELS)).abs().amin(-1)
    stored = (scaled.abs() - torch.tensor(FP4_LEVELS)[(codes & 7).long()]).abs()
    torch.testing.assert_close(stored, nearest)


def test_packed_fp4_keeps_the_even_column_in_the_low_nibble() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)[None]
    packed = fp4_pack(codes)
    assert packed.dtype == torch.int8
    assert packed.view(torch.uint8)[0, 0] == 0x10
    assert torch.equal(fp4_unpack(packed), codes)
    assert fp4_values(codes, torch.zeros(1, 1, dtype=torch.int32))[0, 9] == -0.5


def test_scale_bytes_keep_every_exponent() -> None:
    exponents = torch.arange(-127, 128, dtype=torch.int32)
    scales = exponent_bytes(exponents)
    assert scales.dtype == torch.float8_e8m0fnu
    assert torch.equal(byte_exponents(scales), exponents)
    assert scales.view(torch.uint8)[127] == 127


def test_scale_is_the_smallest_power_of_two_that_fits() -> None:
    peaks = torch.tensor([448.0, 448.1, 224.0, 0.0, 1e-6])
    exponents = scale_exponent(peaks, 448.0)
    assert exponents.tolist()[:4] == [0, 1, -1, 0]
    fits = peaks / torch.ldexp(torch.ones(5), exponents) <= 448.0
    assert fits.all()


def test_fp8_codes_never_overflow() -> None:
    weight = torch.full((128, 128), 447.99)
    codes, exponent = fp8_pack(weight)
    assert torch.isfinite(fp8_unpack(codes, exponent)).all()
