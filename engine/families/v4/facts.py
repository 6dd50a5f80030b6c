"""V4 for those who count rather than run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine.cache.records import Record
from engine.checkpoint.reader import Reader
from engine.families.facts import BLOCK_TOKENS, Facts
from engine.families.v4.config import V4Config, parse
from engine.families.v4.layout import record_layout, v4_layout
from engine.families.v4.options import Options, parse_options, require_widths
from engine.families.v4.records import index_fp4, index_fp8, row_fp8
from engine.families.v4.weights import build
from engine.layout import Layout
from kernels import Ops

FP8_PROJECTIONS = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "e_proj", "h_proj")


def read(config: dict[str, Any], reader: Reader, ops: Ops) -> Facts:
    """Raises CheckpointError naming the key of config.json that cannot be served."""
    parsed = parse(config)
    options = parse_options(config, parsed)
    build(reader, parsed, ops, torch.float32)
    return Facts(
        family="deepseek_v4",
        config=parsed,
        layers=len(parsed.layers),
        layout=lambda dtype, block_tokens=BLOCK_TOKENS: v4_layout(parsed, dtype, block_tokens, mark=options.mark),
        record_layout=partial(_served, parsed, options),
        records={
            "fp8, fp4 index": partial(_fp8, parsed, index_fp4),
            "fp8, fp8 index": partial(_fp8, parsed, index_fp8),
        },
        scale_bytes=1,
        is_fp8=is_fp8,
    )


def is_fp8(name: str) -> bool:
    """Whether a checkpoint of V4, and of V4.1, stores this tensor in FP8 blocks."""
    return name.split(".")[-2] in FP8_PROJECTIONS and ".compressor." not in name


def _served(config: V4Config, options: Options, block_tokens: int) -> Layout:
    require_widths(config)
    return record_layout(config, block_tokens, options.power_scales)


def _fp8(config: V4Config, index: Callable[[int], Record], group: str) -> int | None:
    if group.endswith("_state"):
        return None
    if group == "csa_index":
        return index(config.index_dim).bytes
    return row_fp8(config.head_dim, config.rope_dim).bytes
