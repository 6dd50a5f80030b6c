"""Kinds of canonical records: plain numbers, and FP8 blocks with their scales beside channels kept in bf16.

A record's `version` names its byte layout for good: another layout takes another version.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

_E4M3_MOST = 448.0
_LEAST_PEAK = 1e-4  # largest magnitude that a block is taken to have at least: an empty block needs a scale, too


class Record(Protocol):
    """One kind of record."""

    @property
    def version(self) -> str:
        """Names the byte layout."""

    @property
    def width(self) -> int:
        """Channels."""

    @property
    def bytes(self) -> int:
        """Size of one record."""

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """fp32 [..., width] -> uint8 [..., bytes]. ValueError for another width."""

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """uint8 [..., bytes] -> fp32 [..., width]. ValueError for another type or size."""


class ScaleKind(Enum):
    """How the scale of a block is stored; the value is its size in bytes."""

    E8M0 = 1  # byte b is 2 ** (b - 127); the least power of two that keeps the block within E4M3
    FP32 = 4  # little-endian; maps the block's largest magnitude to E4M3's largest


@dataclass(frozen=True, slots=True)
class PlainRecord:
    """`width` channels as they are, little-endian."""

    version: str
    width: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        _expect_width(self, values)
        return values.to(self.dtype).contiguous().view(torch.uint8)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        _expect_bytes(self, packed)
        return _numbers(packed, self.dtype)


@dataclass(frozen=True, slots=True)
class MixedRecord:
    """`scaled` channels in E4M3, a scale per `block` of them, then `plain` channels in bf16.

    Bytes: codes, scales, bf16, padding; with `scales_last`: codes, bf16, scales, padding. Padding is zero.
    """

    version: str
    scaled: int
    block: int
    plain: int
    scale: ScaleKind
    scales_last: bool
    padding: int = 0

    def __post_init__(self) -> None:
        if self.scaled < 1 or self.scaled % self.block:
            raise ValueError(f"{self.version}: {self.scaled} channels are not whole blocks of {self.block}")

    @property
    def width(self) -> int:
        return self.scaled + self.plain

    @property
    def bytes(self) -> int:
        return sum(self._sizes) + self.padding

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Bytes of the codes and of the two parts behind them, in stored order."""
        scales, plain = self.scaled // self.block * self.scale.value, self.plain * 2
        return (self.scaled, plain, scales) if self.scales_last else (self.scaled, scales, plain)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        _expect_width(self, values)
        blocks = values[..., : self.scaled].unflatten(-1, (-1, self.block))
        peak = blocks.abs().amax(-1).clamp_min(_LEAST_PEAK)
        scale, stored = _e8m0(peak) if self.scale is ScaleKind.E8M0 else _fp32(peak)
        codes = (blocks / scale[..., None]).clamp(-_E4M3_MOST, _E4M3_MOST).to(torch.float8_e4m3fn).flatten(-2)
        plain = values[..., self.scaled :].to(torch.bfloat16).contiguous().view(torch.uint8)
        padding = torch.zeros(*values.shape[:-1], self.padding, dtype=torch.uint8, device=values.device)
        behind = (plain, stored) if self.scales_last else (stored, plain)
        return torch.cat([codes.view(torch.uint8), *behind, padding], -1)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        _expect_bytes(self, packed)
        codes, first, second, _ = packed.split([*self._sizes, self.padding], -1)
        plain, stored = (first, second) if self.scales_last else (second, first)
        scale = _powers(stored) if self.scale is ScaleKind.E8M0 else _numbers(stored, torch.float32)
        blocks = _numbers(codes, torch.float8_e4m3fn).unflatten(-1, (-1, self.block))
        return torch.cat([(blocks * scale[..., None]).flatten(-2), _numbers(plain, torch.bfloat16)], -1)


def _e8m0(peak: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and their bytes. frexp instead of a logarithm: a power of two must not round up."""
    mantissa, exponent = torch.frexp(peak / _E4M3_MOST)
    exponent = exponent - (mantissa == 0.5).int()
    return torch.ldexp(torch.ones_like(peak), exponent), (exponent + 127).to(torch.uint8)


def _powers(stored: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones(stored.shape, device=stored.device), stored.int() - 127)


def _fp32(peak: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (peak / _E4M3_MOST).contiguous()
    return scale, scale.view(torch.uint8)


def _numbers(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as fp32 values of the numbers they are. Copied first: a part of a record need not be aligned."""
    numbers = stored.flatten().clone().view(dtype).to(torch.float32)
    return numbers.view(*stored.shape[:-1], stored.shape[-1] // dtype.itemsize)


def _expect_width(record: Record, values: torch.Tensor) -> None:
    if values.shape[-1] != record.width:
        raise ValueError(f"{record.version}: {values.shape[-1]} channels, expected {record.width}")


def _expect_bytes(record: Record, packed: torch.Tensor) -> None:
    if packed.dtype != torch.uint8 or packed.shape[-1] != record.bytes:
        raise ValueError(f"{record.version}: {packed.dtype} [..., {packed.shape[-1]}], expected {record.bytes} bytes")
