"""The published number formats: FP8 blocks and packed FP4, both with power-of-two scales. Knows no model."""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = 448.0
FP4_MAX = 6.0
FP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
FP4_GROUP = 32
FP8_BLOCK = 128
EXPONENT_BIAS = 127


def scale_exponent(peak: Tensor, limit: float) -> Tensor:
    """Smallest integer e with peak / 2**e <= limit, as int32; 0 for an all-zero block."""
    mantissa, exponent = torch.frexp(peak.float() / limit)
    ceil = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.where(peak > 0, ceil, torch.zeros_like(ceil)).clamp(-EXPONENT_BIAS, EXPONENT_BIAS)


def _spread(values: Tensor, rows: int, columns: int) -> Tensor:
    tall = values.repeat_interleave(FP8_BLOCK, -2)[..., :rows, :]
    return tall.repeat_interleave(FP8_BLOCK, -1)[..., :columns]


def fp8_pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., rows, columns] -> (float8_e4m3fn, int32 exponents per 128 x 128 block, the last ones ragged)."""
    rows, columns = weight.shape[-2:]
    pad = (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK)
    tiles = torch.nn.functional.pad(weight.float(), pad).unflatten(-1, (-1, FP8_BLOCK)).unflatten(-3, (-1, FP8_BLOCK))
    exponent = scale_exponent(tiles.abs().amax((-3, -1)), FP8_MAX)
    scaled = torch.ldexp(weight.float(), -_spread(exponent, rows, columns))
    return scaled.to(torch.float8_e4m3fn), exponent


def fp8_unpack(codes: Tensor, exponent: Tensor) -> Tensor:
    """Inverse of `fp8_pack`, float32."""
    return torch.ldexp(codes.float(), _spread(exponent, *codes.shape[-2:]))


def fp4_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., columns] -> (uint8 codes 0..15, int32 exponents per 32 columns); ties go away from zero."""
    groups = weight.float().unflatten(-1, (-1, FP4_GROUP))
    exponent = scale_exponent(groups.abs().amax(-1), FP4_MAX)
    scaled = torch.ldexp(groups, -exponent.unsqueeze(-1)).flatten(-2)
    edges = torch.tensor(FP4_EDGES, device=weight.device)
    level = torch.bucketize(scaled.abs(), edges, right=True).to(torch.uint8)
    return level | ((scaled < 0) & (level > 0)).to(torch.uint8) << 3, exponent


def fp4_values(codes: Tensor, exponent: Tensor) -> Tensor:
    """Inverse of `fp4_codes`, float32."""
    levels = torch.tensor(FP4_LEVELS, device=codes.device)
    signed = torch.where(codes >= 8, -1.0, 1.0) * levels[(codes & 7).long()]
    return torch.ldexp(signed.unflatten(-1, (-1, FP4_GROUP)), exponent.unsqueeze(-1)).flatten(-2)


def fp4_pack(codes: Tensor) -> Tensor:
    """[..., columns] codes -> int8 [..., columns / 2], the even column in the low nibble."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).view(torch.int8)


def fp4_unpack(packed: Tensor) -> Tensor:
    """Inverse of `fp4_pack`, uint8 codes."""
    raw = packed.view(torch.uint8)
    return torch.stack((raw & 15, raw >> 4), -1).flatten(-2)


def exponent_bytes(exponent: Tensor) -> Tensor:
    """Integer exponents -> float8_e8m0fnu, byte for byte (a numeric cast would destroy them)."""
    return (exponent + EXPONENT_BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)


def byte_exponents(scale: Tensor) -> Tensor:
    """float8_e8m0fnu -> int32 exponents."""
    return scale.view(torch.uint8).to(torch.int32) - EXPONENT_BIAS


def fp8_round(weight: Tensor) -> Tensor:
    """The float32 values that `fp8_pack` stores."""
    return fp8_unpack(*fp8_pack(weight))


def fp4_round(weight: Tensor) -> Tensor:
    """The float32 values that `fp4_codes` stores."""
    return fp4_values(*fp4_codes(weight))
