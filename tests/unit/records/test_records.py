"""Canonical records have their published bytes, equal an independent packer bit for bit, and refuse other sizes."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.records import MixedRecord, PlainRecord, ScaleKind
from engine.families.mla import records as mla
from engine.families.v4 import records as v4

# E4M3 magnitudes by code, from its definition: four exponent bits with bias 7, three mantissa bits, code 127 is NaN.
E4M3 = [(code & 7) / 8 * 2**-6 if code < 8 else (1 + (code & 7) / 8) * 2 ** ((code >> 3) - 7) for code in range(127)]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
RECORDS = {
    "latent bf16": (mla.latent_bf16(512, 64), 1152),
    "latent fp8": (mla.latent_fp8(512, 64), 656),
    "V3.2 index fp8": (mla.index_fp8(128), 132),
    "V4 row": (v4.row_fp8(512, 64), 584),
    "V4 index fp4": (v4.index_fp4(128), 68),
    "V4 index fp8": (v4.index_fp8(128), 132),
}


def f32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def code_of(value, magnitudes):
    """Nearest code of a table, ties to the even code; the sign is added by the caller."""
    size = min(abs(value), magnitudes[-1])
    return min(range(len(magnitudes)), key=lambda code: (abs(magnitudes[code] - size), code % 2))


def e4m3(value):
    return code_of(value, E4M3) | (128 if math.copysign(1, value) < 0 else 0)


def bf16(value):
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def least_power(value):
    """Least integer n with 2 ** n >= value."""
    exponent = -200
    while 2.0**exponent < value:
        exponent += 1
    return exponent


def packed_by_hand(row, scaled, block, fp32_scales, scales_last, padding):
    codes, scales = b"", b""
    for start in range(0, scaled, block):
        part = row[start : start + block]
        ratio = f32(max(f32(1e-4), *map(abs, part)) / 448)
        scale = ratio if fp32_scales else 2.0 ** least_power(ratio)
        codes += bytes(e4m3(f32(value / scale)) for value in part)
        scales += struct.pack("<f", scale) if fp32_scales else bytes([least_power(ratio) + 127])
    plain = b"".join(map(bf16, row[scaled:]))
    return codes + (plain + scales if scales_last else scales + plain) + bytes(padding)


def rows(width, seed, spread=1.0):
    return torch.randn(3, width, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_has_its_published_size(name):
    record, size = RECORDS[name]
    assert record.bytes == size
    assert record.pack(torch.zeros(2, 3, record.width)).shape == (2, 3, size)


@pytest.mark.parametrize("spread", [1e-6, 0.03, 1.0, 500.0])
@pytest.mark.parametrize(
    ("record", "shape"),
    [
        (mla.latent_fp8(512, 64), (512, 128, True, False, 0)),
        (mla.index_fp8(128), (128, 128, True, True, 0)),
        (v4.row_fp8(512, 64), (448, 64, False, True, 1)),
    ],
    ids=["V3 latent", "index", "V4 row"],
)
def test_packing_equals_an_independent_packer_bit_for_bit(record, shape, spread):
    values = rows(record.width, 1, spread)
    values[1, :70] = 0  # a block of nothing, and one that is partly so
    for row, packed in zip(values.tolist(), record.pack(values), strict=True):
        assert bytes(packed.tolist()) == packed_by_hand(row, *shape)


def test_a_fp4_index_key_equals_an_independent_packer_bit_for_bit():
    values = rows(128, 2)
    for row, packed in zip(values.tolist(), v4.index_fp4(128).pack(values), strict=True):
        codes, scales = [], []
        for start in range(0, 128, 32):
            part = row[start : start + 32]
            exponent = least_power(f32(max(map(abs, part)) * f32(1 / 6)))
            scales.append(exponent + 127)
            codes += [code_of(value / 2.0**exponent, E2M1) | (8 if value < 0 else 0) for value in part]
        pairs = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
        assert packed.tolist() == pairs + scales


def test_the_scale_of_a_power_of_two_is_not_rounded_up():
    record = MixedRecord("t.1", 64, 64, 0, ScaleKind.E8M0, scales_last=True)
    values = torch.full((1, 64), 448.0 * 2**-5)
    assert record.pack(values)[0, 64] == 127 - 5
    assert torch.equal(record.unpack(record.pack(values)), values)


@pytest.mark.parametrize("name", RECORDS)
def test_what_a_record_can_hold_survives_a_second_trip(name):
    record, _ = RECORDS[name]
    once = record.unpack(record.pack(rows(record.width, 3)))
    if "index fp8" in name or name == "latent fp8":  # an fp32 scale is drawn anew from the rounded peak
        torch.testing.assert_close(record.unpack(record.pack(once)), once, rtol=1e-6, atol=0)
    else:
        assert torch.equal(record.unpack(record.pack(once)), once)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(-12, 12))
def test_an_e4m3_block_is_within_a_sixteenth_of_its_values_or_of_its_least_step(seed, power):
    record = v4.row_fp8(512, 64)
    values = rows(512, seed, 2.0**power)
    error = (record.unpack(record.pack(values)) - values).abs()
    peak = values[:, :448].unflatten(-1, (7, 64)).abs().amax(-1).clamp_min(1e-4)
    step = (2 * peak / 448 * 2**-9).repeat_interleave(64, -1)
    assert bool((error[:, :448] <= torch.maximum(values[:, :448].abs() / 16, step)).all())
    assert bool((error[:, 448:] <= values[:, 448:].abs() / 256).all())


@pytest.mark.parametrize("name", RECORDS)
def test_another_width_or_size_is_refused_by_version(name):
    record, _ = RECORDS[name]
    with pytest.raises(ValueError, match=record.version):
        record.pack(torch.zeros(record.width + 1))
    with pytest.raises(ValueError, match=record.version):
        record.unpack(torch.zeros(record.bytes + 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match=record.version):
        record.unpack(torch.zeros(record.bytes))


def test_channels_that_are_not_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="not whole blocks of 128"):
        mla.latent_fp8(96, 16)


def test_versions_of_different_layouts_differ():
    versions = [record.version for record, _ in RECORDS.values()] + [PlainRecord("x.1", 1, torch.bfloat16).version]
    assert len(set(versions)) == len(versions)
