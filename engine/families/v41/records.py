"""Canonical records of V4.1: the bytes of one window row, one entry and one index key, by version. Knows no paging."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.families.v41.config import V41Config
from engine.families.v41.formats import ENTRY_FP4, INDEX_FP4, WINDOW_FP8, BlockFormat


@dataclass(frozen=True, slots=True)
class Record:
    """One kind of record: `width` channels in one block format, codes first, then scales."""

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


def window_record(width: int) -> Record:
    """One window row: FP8, one E8M0 scale per 32 channels. 528 bytes at 512 channels."""
    return Record("v41.window.e4m3-e8m0x32.1", width, WINDOW_FP8)


def entry_record(width: int) -> Record:
    """One compressed entry: FP4, one E4M3 scale per 16 channels. 288 bytes at 512 channels."""
    return Record("v41.entry.e2m1-e4m3x16.1", width, ENTRY_FP4)


def index_record(width: int) -> Record:
    """One index key: FP4, one E8M0 scale per 32 channels. 68 bytes at 128 channels."""
    return Record("v41.index.e2m1-e8m0x32.1", width, INDEX_FP4)


def global_bytes_per_token(config: V41Config) -> float:
    """Bytes of canonical entries and index keys that one token of context adds, over all layers."""
    schedule = config.schedule
    both = entry_record(config.head_dim).bytes + index_record(config.index_dim).bytes
    return sum(len(schedule.sources(ratio)) * both / ratio for ratio in schedule.ratios)


def window_bytes_per_sequence(config: V41Config) -> int:
    """Bytes of canonical window rows that one sequence holds, over all layers."""
    return config.layers * config.window * window_record(config.head_dim).bytes
