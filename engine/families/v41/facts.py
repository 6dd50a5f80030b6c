"""V4.1 for those who count rather than run, its vision encoder included where there is one."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from engine.checkpoint.reader import Reader
from engine.families.facts import BLOCK_TOKENS, Facts
from engine.families.v4.facts import is_fp8
from engine.families.v4.records import index_fp8, row_fp8
from engine.families.v41 import weights
from engine.families.v41.config import V41Config, parse
from engine.families.v41.layout import record_layout, v41_layout
from engine.families.v41.options import Options, parse_options, require_widths
from engine.families.v41.records import entry_record, index_record, window_record
from engine.families.v41.vision import weights as vision
from engine.families.v41.vision.config import parse_vision
from engine.layout import Layout
from kernels import Ops


def read(config: dict[str, Any], reader: Reader, ops: Ops) -> Facts:
    """Raises CheckpointError naming the key of config.json that cannot be served."""
    parsed, options = parse(config), parse_options(config)
    weights.build(reader, parsed, ops, torch.float32)
    sees = parse_vision(config)
    if sees and any(map(reader.has, vision.PREFIXES)):  # a folder may leave the encoder out
        vision.build(reader, sees, torch.float32)
    return Facts(
        family="deepseek_v41",
        config=parsed,
        layers=parsed.layers,
        layout=lambda dtype, block_tokens=BLOCK_TOKENS: v41_layout(parsed, options, dtype, block_tokens),
        record_layout=partial(_served, parsed, options),
        records={"fp4, fp8 window": partial(_canonical, parsed), "V4's fp8 rows": partial(_fp8, parsed)},
        scale_bytes=1,
        is_fp8=is_fp8,
    )


def _served(config: V41Config, options: Options, block_tokens: int) -> Layout:
    require_widths(config)
    return record_layout(config, options, block_tokens)


def _canonical(config: V41Config, group: str) -> int | None:
    if group == "window":
        return window_record(config.head_dim).bytes
    if group.startswith("entries_"):
        return entry_record(config.head_dim).bytes
    return index_record(config.index_dim).bytes if group.startswith("index_") else None


def _fp8(config: V41Config, group: str) -> int | None:
    if group.startswith("index_"):
        return index_fp8(config.index_dim).bytes
    is_row = group == "window" or group.startswith("entries_")
    return row_fp8(config.head_dim, config.rope_dim).bytes if is_row else None
