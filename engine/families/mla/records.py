"""Canonical records of V2, V3 and V3.2: one latent row with its rotary key, and V3.2's index key. Knows no paging."""

from __future__ import annotations

import torch

from engine.cache.records import MixedRecord, PlainRecord, ScaleKind


def latent_bf16(rank: int, rope: int) -> PlainRecord:
    """Latent, then rotary key, in bf16. 1152 bytes at 512 + 64."""
    return PlainRecord("mla.latent.bf16.1", rank + rope, torch.bfloat16)


def latent_fp8(rank: int, rope: int) -> MixedRecord:
    """E4M3 latent, one fp32 scale per 128 channels, rotary key in bf16, as FlashMLA reads it. 656 bytes at 512 + 64."""
    return MixedRecord("mla.latent.e4m3-f32x128.1", rank, 128, rope, ScaleKind.FP32, scales_last=False)


def index_bf16(width: int) -> PlainRecord:
    """Index key in bf16. 256 bytes at 128."""
    return PlainRecord("mla.index.bf16.1", width, torch.bfloat16)


def index_fp8(width: int) -> MixedRecord:
    """E4M3 index key, then one fp32 scale per 128 channels. 132 bytes at 128."""
    return MixedRecord("mla.index.e4m3-f32x128.1", width, 128, 0, ScaleKind.FP32, scales_last=True)


def index_e8m0(width: int) -> MixedRecord:
    """As `index_fp8` where scales are powers of two: the same numbers, one byte a scale. 129 bytes at 128."""
    return MixedRecord("mla.index.e4m3-e8m0x128.1", width, 128, 0, ScaleKind.E8M0, scales_last=True)
