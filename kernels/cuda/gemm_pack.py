"""FP4 weights in the order in which threads of the products' kernels read them. Launches nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kernels.errors import KernelError
from kernels.reference.gemm import DEPTH, Activations, Fp4Weights, check_activations

CHUNK_BYTES = 64 * DEPTH // 2 + 64 * 4  # 64 rows of 128 channels with their scales
_ROOM = 11  # how far below the largest of a row's four exponents another may lie: e4m3 holds both exactly


@dataclass(frozen=True, slots=True, eq=False)
class PackedFp4:
    """What `pack_fp4` made: uint8 [groups, rows / 64, channels / 128, 4352].

    `even`: rows of a chunk have one common exponent, as the kernel for many tokens wants it.
    """

    chunks: Tensor
    rows: int
    even: bool

    grain: ClassVar[int] = 128  # scales of finer grain are within the codes

    @property
    def channels(self) -> int:
        return self.chunks.shape[2] * DEPTH


def pack_fp4(weights: Fp4Weights) -> PackedFp4:
    """Codes in the order in which threads of the kernel read them, and one word of scales for 128 channels of a row.

    Raises KernelError where rows are no multiple of 64, channels of 128, an exponent is NaN, or scales of 128 channels
    of a row differ by more than 2**11 (decoded codes would not fit e4m3).
    """
    groups, rows, half = weights.codes.shape
    if rows % 64 or half % 64 or tuple(weights.scales.shape) != (groups, rows, half // 16):
        raise KernelError(f"FP4 weights [{groups}, {rows}, {half * 2}]", fix="pad rows to 64 and channels to 128")
    blocks = half // 64
    nibbles = torch.stack([weights.codes & 15, weights.codes >> 4], -1).flatten(2).to(torch.int32)
    words, even = _scale_words(weights.scales.view(groups, rows, blocks, 4), nibbles.view(groups, rows, blocks, 4, 32))
    # [tile, warp, half of its rows, row, block, step, half of the step, lane of the row, channel]
    parts = nibbles.view(groups, rows // 64, 4, 2, 8, blocks, 4, 2, 4, 4)
    magnitude, sign = parts & 7, parts >> 3
    found = torch.zeros(groups, rows // 64, 4, 2, 8, blocks, 4, 4, dtype=torch.int32, device=parts.device)
    for half_step in range(2):
        for channel in range(4):
            found |= magnitude[..., half_step, :, channel] << 4 * (4 * half_step + channel)
            found |= sign[..., half_step, :, channel] << 4 * (2 * channel + 1 - half_step) + 3
    # -> [tile, block, pair of steps, warp, row, lane, step of the pair, half of the rows]
    found = found.view(groups, rows // 64, 4, 2, 8, blocks, 2, 2, 4).permute(0, 1, 5, 6, 2, 4, 8, 7, 3)
    codes = found.reshape(groups, rows // 64, blocks, 1024)
    scales = words.view(groups, rows // 64, 64, blocks).mT
    return PackedFp4(torch.cat([codes, scales], 3).contiguous().view(torch.uint8), rows, even)


def check_packed(
    activations: Activations, weights: PackedFp4, counts: Tensor | None, experts: Tensor | None, output: Tensor
) -> None:
    """Raises KernelError for operands that do not go together."""
    check_activations(activations, counts, experts, len(weights.chunks), weights.rows, output)
    if weights.channels != activations.codes.shape[2]:
        raise KernelError(f"weights have {weights.channels} channels", fix="pass those of this layer")


def _scale_words(scales: Tensor, nibbles: Tensor) -> tuple[Tensor, bool]:
    """int32 [groups, rows, blocks]: shifts of four times 32 channels in bits 3 to 18, a common exponent in 23 to 30.

    That exponent is common to the 64 rows of a chunk, or else to 128 channels of a row; and whether all are the former.
    """
    exponents = scales.to(torch.int32)
    if bool((exponents == 255).any()):
        raise KernelError("an FP4 scale is NaN", fix="quantize the weights again")
    empty = ((nibbles & 7) == 0).all(-1)
    exponents = exponents.masked_fill(empty, 0)
    common = (exponents.amax(-1, keepdim=True) - 6).clamp_min(1)
    of_chunks = common.unflatten(1, (-1, 64)).amax(2, keepdim=True).expand(-1, -1, 64, -1, -1).flatten(1, 2)
    fit = ((exponents - of_chunks + 5 >= 0) | empty).all(-1, keepdim=True)
    fit = fit.unflatten(1, (-1, 64)).all(2, keepdim=True).expand(-1, -1, 64, -1, -1).flatten(1, 2)
    common = torch.where(fit, of_chunks, common)
    shifts = exponents - common + 5
    if bool((shifts[~empty] < 0).any()):
        raise KernelError(f"FP4 scales of 128 channels differ by more than 2**{_ROOM}", fix="keep these weights in FP8")
    place = torch.tensor([3, 7, 11, 15], dtype=torch.int32, device=scales.device)
    words = (shifts.clamp_min(0) << place).sum(-1, dtype=torch.int32) | common[..., 0] << 23
    return words, bool(fit.all())
