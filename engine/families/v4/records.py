"""Canonical records of V4: a window row or compressed entry, and the two forms of an index key. Knows no paging."""

from __future__ import annotations

import torch

from engine.cache.records import MixedRecord, PlainRecord, ScaleKind
from engine.cache.records.blocks import INDEX_FP4, BlockRecord


def row_bf16(width: int) -> PlainRecord:
    """Window row, compressed entry or index key in bf16. 1024 bytes at 512."""
    return PlainRecord("v4.row.bf16.1", width, torch.bfloat16)


def row_fp8(width: int, rope: int) -> MixedRecord:
    """E4M3 channels without position, rotary channels in bf16, one E8M0 scale per 64, a pad. 584 bytes at 448 + 64."""
    return MixedRecord("v4.row.e4m3-e8m0x64.1", width - rope, 64, rope, ScaleKind.E8M0, scales_last=True, padding=1)


def index_fp4(width: int) -> BlockRecord:
    """Index key in E2M1, low nibble first, then one E8M0 scale per 32. 68 bytes at 128. The key is already rotated."""
    return BlockRecord("v4.index.e2m1-e8m0x32.1", width, INDEX_FP4)


def index_fp8(width: int) -> MixedRecord:
    """E4M3 index key, then one fp32 scale per 128 channels. 132 bytes at 128."""
    return MixedRecord("v4.index.e4m3-f32x128.1", width, 128, 0, ScaleKind.FP32, scales_last=True)
