"""Stored number formats and what they mean: FP8 blocks, packed FP4, E8M0 and plain floats. Knows tensors, not files.

Formats: OCP Microscaling (E2M1, E8M0) and FP8 E4M3 as DeepSeek-V4's published checkpoints use them. Every scale
multiplies. An E8M0 byte b is 2**(b - 127), 255 is NaN.
"""

from __future__ import annotations

import torch

from engine.checkpoint.scales import FP4_GROUP

_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float32)


class FormatError(ValueError):
    """Operands that do not make a valid weight; the caller knows which tensor they are."""


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Scales as fp32: uint8 means E8M0, floats mean themselves. Raises FormatError unless positive and finite."""
    if scale.dtype != torch.uint8:
        values = scale.to(torch.float32)
    else:
        if bool((scale == 255).any()):
            raise FormatError("a scale is NaN")
        values = powers_of_two(scale)
    if not bool(torch.isfinite(values).all()):
        raise FormatError("a scale is NaN or infinite")
    if bool((values <= 0).any()):
        raise FormatError("a scale is not positive")
    return values


def powers_of_two(scale: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes 0 .. 254 as fp32: the byte is fp32's own exponent field, except that 2**-127 is subnormal."""
    bits = torch.where(scale == 0, 0x00400000, scale.to(torch.int32) << 23)
    return bits.view(torch.float32)


def fp8_blocks(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """float8_e4m3fn [out, in] times one scale per block [ceil(out / b0), ceil(in / b1)] -> fp32 [out, in]."""
    wanted = tuple(-(-n // b) for n, b in zip(weight.shape, block, strict=True))
    if tuple(scale.shape) != wanted:
        raise FormatError(f"scales {list(scale.shape)} do not fit blocks of {list(block)}: {list(wanted)} are needed")
    step = min(block[1], weight.shape[1])  # a block may be larger than the matrix
    values, factors = weight.to(torch.float32), scale_values(scale).repeat_interleave(step, 1)
    for row, factor in enumerate(factors[:, : weight.shape[1]]):
        values[row * block[0] : (row + 1) * block[0]] *= factor
    return values


def fp4_packed(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """uint8 [out, in / 2], low nibble first, one E8M0 scale per 32 inputs [out, in / 32] -> fp32 [out, in]."""
    rows, columns = weight.shape[0], weight.shape[1] * 2
    if scale.dtype != torch.uint8 or tuple(scale.shape) != (rows, -(-columns // FP4_GROUP)):
        raise FormatError(f"FP4 needs E8M0 scales [{rows}, {-(-columns // FP4_GROUP)}], found {list(scale.shape)}")
    values = torch.empty(rows, columns)
    for parity in (0, 1):
        codes = weight >> 4 if parity else weight & 15
        values[:, parity::2] = _FP4[codes.to(torch.int32)]
    factors = scale_values(scale)
    if columns % FP4_GROUP == 0:
        return values.view(rows, -1, FP4_GROUP).mul_(factors[..., None]).view(rows, columns)
    return values.mul_(factors.repeat_interleave(FP4_GROUP, 1)[:, :columns])
