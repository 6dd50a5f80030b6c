"""V2, V3 and V3.2 for those who count rather than run."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from engine.checkpoint.reader import Reader
from engine.families.facts import BLOCK_TOKENS, Facts
from engine.families.mla.build import build
from engine.families.mla.config import MlaConfig, parse
from engine.families.mla.layout import mla_layout, record_layout
from engine.families.mla.options import Options, parse_options, require_widths
from engine.families.mla.records import index_fp8, latent_fp8
from engine.layout import Layout
from kernels import Ops

_BF16 = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "eh_proj", "weights_proj", "shared_head")


def read(config: dict[str, Any], reader: Reader, ops: Ops) -> Facts:
    """Raises CheckpointError naming the key of config.json that cannot be served."""
    parsed = parse(config)
    options = parse_options(config, parsed)
    build(reader, parsed, ops, torch.float32, False)
    return Facts(
        family=parsed.model_type,
        config=parsed,
        layers=len(parsed.dense),
        layout=lambda dtype, block_tokens=BLOCK_TOKENS: mla_layout(parsed, dtype, block_tokens, options.mark),
        record_layout=partial(_served, parsed, options),
        records={"fp8": partial(_fp8, parsed)},
        scale_bytes=4,
        is_fp8=lambda name: not any(part in name for part in _BF16),
    )


def _served(config: MlaConfig, options: Options, block_tokens: int) -> Layout:
    require_widths(config)
    return record_layout(config, block_tokens, options.power_scales)


def _fp8(config: MlaConfig, group: str) -> int | None:
    if group == "latent":
        return latent_fp8(config.latent_rank, config.rope).bytes
    return index_fp8(config.index.width).bytes if config.index else None
