"""Canonical records of V4.1: the bytes of one window row, one entry and one index key, by version. Knows no paging."""

from __future__ import annotations

from engine.cache.records.blocks import ENTRY_FP4, INDEX_FP4, WINDOW_FP8, BlockRecord
from engine.families.v41.config import V41Config


def window_record(width: int) -> BlockRecord:
    """One window row: FP8, one E8M0 scale per 32 channels. 528 bytes at 512 channels."""
    return BlockRecord("v41.window.e4m3-e8m0x32.1", width, WINDOW_FP8)


def entry_record(width: int) -> BlockRecord:
    """One compressed entry: FP4, one E4M3 scale per 16 channels. 288 bytes at 512 channels."""
    return BlockRecord("v41.entry.e2m1-e4m3x16.1", width, ENTRY_FP4)


def index_record(width: int) -> BlockRecord:
    """One index key: FP4, one E8M0 scale per 32 channels. 68 bytes at 128 channels."""
    return BlockRecord("v41.index.e2m1-e8m0x32.1", width, INDEX_FP4)


def global_bytes_per_token(config: V41Config) -> float:
    """Bytes of canonical entries and index keys that one token of context adds, over all layers."""
    schedule = config.schedule
    both = entry_record(config.head_dim).bytes + index_record(config.index_dim).bytes
    return sum(len(schedule.sources(ratio)) * both / ratio for ratio in schedule.ratios)


def window_bytes_per_sequence(config: V41Config) -> int:
    """Bytes of canonical window rows that one sequence holds, over all layers."""
    return config.layers * config.window * window_record(config.head_dim).bytes
