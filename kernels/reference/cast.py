"""Casts to scaled narrow numbers in torch: E4M3 and E2M1, one scale per group of a row's columns or per square block.

A scale multiplies: value = code * scale. Of a group with largest magnitude a, M the format's largest number (448, 6):
FP32 scale max(a, 1e-4) / M, codes round(x * (M / max(a, 1e-4))); E8M0 scale 2**ceil(log2(max(a, low) / M)) (low is 1e-4
for E4M3, 6 * 2**-126 for E2M1), codes round(x / scale); E4M3 scale round(max(a, 6 * 2**-9) / 6), at most 448, codes
round(x / scale). Everything in fp32 and to nearest, ties to the even code; codes beyond M become M. E2M1: two a byte,
the lower column in the lower nibble. A NaN or infinity makes its group's scale NaN or infinite (E8M0: 255, E4M3: NaN):
what lies in such a group's codes means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from kernels.errors import KernelError


class Code(Enum):
    """The format of a code; the value is its largest number."""

    E4M3 = 448.0
    E2M1 = 6.0


class Scale(Enum):
    """The format of a scale; the value is what kernels are compiled with."""

    FP32 = 0
    E8M0 = 1
    E4M3 = 2


_SCALE_TYPES = {Scale.FP32: torch.float32, Scale.E8M0: torch.uint8, Scale.E4M3: torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class CastSpec:
    """How a row is cast: `group` columns share a scale. Raises KernelError for formats nobody defined."""

    code: Code
    group: int
    scale: Scale

    def __post_init__(self) -> None:
        if self.group not in (16, 32, 64, 128):
            raise KernelError(f"a scale per {self.group} columns", fix="use 16, 32, 64 or 128")
        if (self.scale is Scale.E4M3) and self.code is not Code.E2M1:
            raise KernelError("E4M3 scales of E4M3 codes", fix="use FP32 or E8M0 scales")

    @property
    def floor(self) -> float:
        """What a group's largest magnitude counts as at least."""
        if self.scale is Scale.E4M3:
            return 6 * 2.0**-9
        return 6 * 2.0**-126 if self.code is Code.E2M1 and self.scale is Scale.E8M0 else 1e-4

    @property
    def code_type(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.code is Code.E4M3 else torch.uint8

    @property
    def scale_type(self) -> torch.dtype:
        return _SCALE_TYPES[self.scale]

    def code_columns(self, width: int) -> int:
        """Columns of the codes of a row of `width` numbers."""
        return width if self.code is Code.E4M3 else width // 2


def cast_rows(x: Tensor, spec: CastSpec) -> tuple[Tensor, Tensor]:
    """x [rows, width] -> codes [rows, width, or half of it], scales [rows, width / group]."""
    groups = x.to(torch.float32).unflatten(1, (-1, spec.group))
    stored, factor, divides = scales_of(groups.abs().amax(-1), spec)
    scaled = groups / factor[..., None] if divides else groups * factor[..., None]
    return encode(scaled.flatten(1), spec.code), stored


def cast_blocks(x: Tensor, size: int, scale: Scale) -> tuple[Tensor, Tensor]:
    """x [rows, width] -> E4M3 codes [rows, width] and a scale for each `size` x `size` block, less at edges."""
    rows, width = x.shape
    padded = torch.nn.functional.pad(x.to(torch.float32), (0, -width % size, 0, -rows % size))
    blocks = padded.unflatten(1, (-1, size)).unflatten(0, (-1, size))
    stored, factor, _ = scales_of(blocks.abs().amax((1, 3)), CastSpec(Code.E4M3, 128, scale))
    codes = (blocks * factor[:, None, :, None]).flatten(2, 3).flatten(0, 1)
    return encode(codes[:rows, :width], Code.E4M3), stored


def scales_of(largest: Tensor, spec: CastSpec) -> tuple[Tensor, Tensor, bool]:
    """Scales as stored, what to apply to the numbers (fp32), and whether they are divided by it, not multiplied."""
    held = torch.where(largest < spec.floor, spec.floor, largest.to(torch.float32))
    most = torch.full_like(held, spec.code.value)  # torch divides by and into a plain number with other roundings
    if spec.scale is Scale.FP32:
        return held / most, most / held, False
    if spec.scale is Scale.E4M3:
        stored = torch.where(held.isfinite(), (held / most).clamp(max=448.0), torch.nan).to(torch.float8_e4m3fn)
        return stored, stored.to(torch.float32), True
    bits = (held / most).view(torch.int32).to(torch.int64) + 0x7F_FFFF >> 23
    stored = bits.clamp(max=255)
    return stored.to(torch.uint8), (254 - stored << 23).to(torch.int32).view(torch.float32), False


def encode(scaled: Tensor, code: Code) -> Tensor:
    """Codes of numbers of the format's own range, fp32 [rows, width]."""
    if code is Code.E4M3:
        return scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
    size = scaled.abs().clamp(max=6)
    # A step of 1/2 below 2, 1 below 4, 2 above: each adds codes at its own pace.
    magnitude = torch.where(
        size < 2, (size * 2).round(), torch.where(size < 4, size.round() + 2, (size / 2).round() + 4)
    )
    nibbles = magnitude.nan_to_num().to(torch.uint8) | scaled.signbit().to(torch.uint8) << 3
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


def decode(codes: Tensor, scales: Tensor, spec: CastSpec) -> Tensor:
    """What codes and scales of `cast_rows` mean, float64 [rows, width]."""
    if spec.code is Code.E4M3:
        values = codes.to(torch.float64)
    else:
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=codes.device)
        nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
        values = torch.where(nibbles > 7, -table[nibbles & 7], table[nibbles & 7])
    return (values.unflatten(1, (-1, spec.group)) * scale_values(scales)[..., None]).flatten(1)


def scale_values(scales: Tensor) -> Tensor:
    """float64 of stored scales."""
    if scales.dtype != torch.uint8:
        return scales.to(torch.float64)
    powers = torch.ldexp(torch.ones(scales.shape, dtype=torch.float64, device=scales.device), scales.int() - 127)
    return torch.where(scales == 255, torch.nan, powers)


def check_cast(x: Tensor, spec: CastSpec, codes: Tensor, scales: Tensor) -> None:
    """Raises KernelError naming the first operand of `cast_rows` that no implementation takes."""
    rows, width = x.shape
    if width % spec.group or x.dtype not in (torch.bfloat16, torch.float32) or x.stride(1) != 1:
        fix = f"pass bf16 or fp32 rows of adjacent columns, a multiple of {spec.group}"
        raise KernelError(f"x is {x.dtype} {list(x.shape)}", fix=fix)
    check_codes(codes, scales, spec, rows, width)


def check_codes(codes: Tensor, scales: Tensor, spec: CastSpec, rows: int, width: int) -> None:
    """Raises KernelError where places for codes and scales of [rows, width] do not fit; scales may stand by columns."""
    wanted = (rows, spec.code_columns(width))
    if codes.dtype != spec.code_type or tuple(codes.shape) != wanted or codes.stride(1) != 1:
        found = f"{codes.dtype} {list(codes.shape)}"
        raise KernelError(f"codes is {found}", fix=f"pass {spec.code_type} {list(wanted)}, columns adjacent")
    if scales.dtype != spec.scale_type or tuple(scales.shape) != (rows, width // spec.group):
        found = f"{scales.dtype} {list(scales.shape)}"
        raise KernelError(f"scales is {found}", fix=f"pass {spec.scale_type} {[rows, width // spec.group]}")
