"""Records of FP8 or FP4 blocks, each with its scale: encoded and decoded exactly.

E4M3 and E2M1 codes (OCP Microscaling); a scale is E8M0 (byte b is 2**(b - 127)) or itself E4M3. Codes round to
nearest, ties to even.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E4M3_MOST, _E2M1_MOST = 448.0, 6.0


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Blocks of `block` channels that share one scale byte, `code_bits` bits per channel."""

    block: int
    code_bits: int
    scale: Callable[[torch.Tensor], torch.Tensor]  # largest magnitude of a block -> its scale, fp32
    scale_code: Callable[[torch.Tensor], torch.Tensor]  # scale -> byte
    scale_value: Callable[[torch.Tensor], torch.Tensor]  # byte -> scale

    def record_bytes(self, width: int) -> int:
        """Bytes of `width` channels: their codes, then their scales."""
        return width * self.code_bits // 8 + width // self.block

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x fp32 [..., width] -> code bytes [..., width * code_bits / 8], scale bytes [..., width / block], uint8."""
        blocks = x.unflatten(-1, (-1, self.block))
        scale = self.scale(blocks.abs().amax(-1, keepdim=True))
        write = _e4m3_codes if self.code_bits == 8 else _e2m1_codes
        return write((blocks / scale).flatten(-2)), self.scale_code(scale.squeeze(-1))

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The fp32 values that `encode`'s bytes stand for."""
        values = _e4m3_values(codes) if self.code_bits == 8 else _e2m1_values(codes)
        return (values.unflatten(-1, (-1, self.block)) * self.scale_value(scales)[..., None]).flatten(-2)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., width] as this format can hold it; unchanged where its width is not a multiple of the block."""
        return x if x.shape[-1] % self.block else self.decode(*self.encode(x))


def _power_at_least(value: torch.Tensor) -> torch.Tensor:
    """2 ** ceil(log2 value), without a logarithm's rounding."""
    mantissa, exponent = torch.frexp(value)
    return torch.ldexp(torch.ones_like(value), exponent - (mantissa == 0.5).int())


def _e8m0_code(scale: torch.Tensor) -> torch.Tensor:
    return (torch.frexp(scale).exponent + 126).to(torch.uint8)


def _e8m0_value(code: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones(code.shape, device=code.device), code.to(torch.int32) - 127)


def _e4m3_codes(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_E4M3_MOST, _E4M3_MOST).to(torch.float8_e4m3fn).view(torch.uint8)


def _e4m3_values(codes: torch.Tensor) -> torch.Tensor:
    return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)


@functools.cache
def _on(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1's magnitudes and what lies halfway between them. Kept by device: a copy in every call would be a wait."""
    return _E2M1.to(device), ((_E2M1[1:] + _E2M1[:-1]) / 2).to(device)


def _e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """Two codes to a byte, the first in the low nibble."""
    size = x.abs().clamp(max=_E2M1_MOST).contiguous()
    between = _on(size.device)[1]
    below, above = torch.searchsorted(between, size), torch.searchsorted(between, size, right=True)
    code = torch.where(below % 2 == 0, below, above).to(torch.uint8)  # they differ on a tie only
    code = code | torch.signbit(x).to(torch.uint8) << 3
    return code[..., 0::2] | code[..., 1::2] << 4


def _e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).to(torch.int64)
    sizes = _on(codes.device)[0][nibbles & 7]
    return torch.where(nibbles > 7, -sizes, sizes)


WINDOW_FP8 = BlockFormat(
    32, 8, lambda most: _power_at_least(most.clamp_min(1e-4) * (1 / _E4M3_MOST)), _e8m0_code, _e8m0_value
)
ENTRY_FP4 = BlockFormat(
    16,
    4,
    lambda most: _e4m3_values(_e4m3_codes(most.clamp_min(_E2M1_MOST * 2.0**-9) / _E2M1_MOST)),
    _e4m3_codes,
    _e4m3_values,
)
INDEX_FP4 = BlockFormat(
    32,
    4,
    lambda most: _power_at_least(most.clamp_min(_E2M1_MOST * 2.0**-126) * (1 / _E2M1_MOST)),
    _e8m0_code,
    _e8m0_value,
)


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """`width` channels in one block format, codes first, then scales."""

    version: str
    width: int
    format: BlockFormat

    def __post_init__(self) -> None:
        if self.width < 1 or self.width % self.format.block:
            raise ValueError(f"{self.version}: {self.width} channels are not whole blocks of {self.format.block}")

    @property
    def bytes(self) -> int:
        """Size of one record."""
        return self.format.record_bytes(self.width)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """fp32 [..., width] -> uint8 [..., bytes]. ValueError for another width."""
        if values.shape[-1] != self.width:
            raise ValueError(f"{self.version}: {values.shape[-1]} channels, expected {self.width}")
        return torch.cat(self.format.encode(values), -1)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """uint8 [..., bytes] -> fp32 [..., width]. ValueError for another size."""
        if packed.dtype != torch.uint8 or packed.shape[-1] != self.bytes:
            raise ValueError(f"{self.version}: {packed.dtype} [..., {packed.shape[-1]}], expected {self.bytes} bytes")
        codes, scales = packed.split([self.width * self.format.code_bits // 8, self.width // self.format.block], -1)
        return self.format.decode(codes, scales)
