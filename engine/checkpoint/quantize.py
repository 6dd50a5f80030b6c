"""Writing the stored formats: FP8 blocks and packed FP4, both with E8M0 scales. The inverse of formats.py."""

from __future__ import annotations

import torch

from engine.checkpoint.formats import FP4_GROUP, powers_of_two

_FP8_MOST, _FP4_MOST = 448.0, 6.0
_FP4_BOUNDS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # halfway between neighbouring magnitudes


def fp8_quantize(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [out, in] -> float8_e4m3fn [out, in] and uint8 E8M0 scales, one per (possibly ragged) block."""
    rows, columns = (-(-n // b) for n, b in zip(weight.shape, block, strict=True))
    padded = torch.zeros(rows * block[0], columns * block[1])
    padded[: weight.shape[0], : weight.shape[1]] = weight
    largest = padded.view(rows, block[0], columns, block[1]).abs().amax((1, 3))
    scale = _power_of_two(largest / _FP8_MOST)
    values = powers_of_two(scale)
    spread = values.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return (weight / spread[: weight.shape[0], : weight.shape[1]]).to(torch.float8_e4m3fn), scale


def fp4_quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [out, in] -> uint8 [out, in / 2], low nibble first, and uint8 E8M0 scales [out, in / 32]; in % 32 == 0."""
    groups = weight.view(weight.shape[0], -1, FP4_GROUP)
    scale = _power_of_two(groups.abs().amax(-1) / _FP4_MOST)
    values = groups / powers_of_two(scale)[..., None]
    codes = torch.bucketize(values.abs(), _FP4_BOUNDS).to(torch.uint8) | (values < 0).to(torch.uint8) * 8
    codes = codes.flatten(1)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scale


def _power_of_two(value: torch.Tensor) -> torch.Tensor:
    """The E8M0 byte of the least power of two that is not below `value`."""
    exponent = torch.ceil(torch.log2(value.clamp(min=2.0**-126)))
    return (exponent + 127).to(torch.uint8)
