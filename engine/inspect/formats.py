"""The published storage of each tensor: which format, how many bytes. Knows names and shapes; reads no file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.scales import FP4_GROUP, quantization
from engine.families.facts import Facts
from engine.families.inventory import Wanted
from engine.inspect.parts import Part

_FP32_NAMES = ("hc_", "attn_sink", ".ape", "gate.bias", "e_score_correction_bias", "q_weight", "k_weight", "image_")
_ROW_GROUP = 32  # channels of an Engram row that share one scale


class Format(StrEnum):
    """How numbers are stored; scales are counted with the weights that they belong to."""

    FP4 = "FP4 in groups"
    FP8 = "FP8 in blocks"
    FP8_ROWS = "FP8 rows"
    BF16 = "bf16"
    FP32 = "fp32"
    INT64 = "int64"


@dataclass(frozen=True, slots=True)
class Publication:
    """What a config says about storage. `block` is None for a model in bf16."""

    block: tuple[int, int] | None
    fp4_experts: bool
    scale_bytes: int  # of one FP8 block
    is_fp8: Callable[[str], bool]  # by upstream tensor name


def publication(config: dict[str, Any], facts: Facts) -> Publication:
    """Raises CheckpointError naming `quantization_config` where it is not one."""
    block = quantization(config).block
    settings = config.get("quantization_config") or {}
    expert = settings.get("expert_dtype", config.get("expert_dtype"))
    if expert not in (None, "fp4", "fp8"):
        raise CheckpointError(f"{expert!r} is unknown", file="config.json", item="expert_dtype", fix="use fp4 or fp8")
    return Publication(block, expert == "fp4", facts.scale_bytes, facts.is_fp8)


def stored(wanted: Wanted, part: Part, published: Publication) -> tuple[Format, int]:
    """Format and bytes, scales included."""
    kind = _format(wanted, part, published)
    if kind is Format.FP8 and published.block:
        rows, columns = (-(-size // step) for size, step in zip(wanted.shape, published.block, strict=True))
        return kind, wanted.numbers + rows * columns * published.scale_bytes
    if kind is Format.FP8_ROWS:
        return kind, wanted.numbers + wanted.shape[0] * -(-wanted.shape[1] // _ROW_GROUP)
    if kind is Format.FP4:
        return kind, wanted.numbers // 2 + wanted.shape[0] * -(-wanted.shape[1] // FP4_GROUP)
    return kind, wanted.numbers * {Format.BF16: 2, Format.FP32: 4}.get(kind, 8)


def unit(kind: Format, published: Publication) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    if kind is Format.FP8 and published.block:
        return published.block
    return {Format.FP8_ROWS: (1, _ROW_GROUP), Format.FP4: (1, FP4_GROUP)}.get(kind, (1, 1))


def _format(wanted: Wanted, part: Part, published: Publication) -> Format:
    if wanted.integer:
        return Format.INT64
    if any(key in wanted.name for key in _FP32_NAMES):
        return Format.FP32
    if part is Part.VISION:
        return Format.BF16
    if published.block is None or len(wanted.shape) != 2 or not wanted.name.endswith(".weight"):
        return Format.BF16
    if part is Part.ENGRAM_TABLE:
        return Format.FP8_ROWS
    if ".experts." in wanted.name and published.fp4_experts:
        return Format.FP4
    return Format.FP8 if published.is_fp8(wanted.name) else Format.BF16
