"""How V4 is served where its makers leave a choice: the precision of what is cached. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.checkpoint.errors import CheckpointError
from engine.families.rounding import hadamard
from engine.families.serving import flags, require_records
from engine.families.v4.config import SWITCHES, LayerKind, V4Config
from engine.families.v4.records import index_fp4, row_fp8
from kernels import Ops
from kernels.operands import IndexMixing


@dataclass(frozen=True, slots=True)
class Options:
    """`fake_quantize`: cached rows hold the values their published 8 and 4 bit formats can hold, as trained.

    `power_scales`: each scale of an index key that is cached as a record is a power of two, as the checkpoint's
    quantization_config.scale_fmt says.
    """

    fake_quantize: bool = False
    power_scales: bool = False

    @property
    def mark(self) -> str:
        """What the record versions of this choice end in: other values are other records."""
        return "q" if self.fake_quantize else ""


def parse_options(config: dict[str, Any], parsed: V4Config) -> Options:
    """The `serving` section. Raises CheckpointError naming the key, also for widths that the formats cannot hold."""
    quantization = config.get("quantization_config")
    given = quantization.get("scale_fmt") if isinstance(quantization, dict) else None
    options = Options(**flags(config, SWITCHES), power_scales=given == "ue8m0")
    if options.fake_quantize:
        try:
            row_fp8(parsed.head_dim, parsed.rope_dim)
            if LayerKind.CSA in parsed.layers:
                hadamard(index_fp4(parsed.index_dim).width)
        except ValueError as error:
            fix = "leave fake_quantize out of `serving`"
            raise CheckpointError(str(error), file="config.json", item="fake_quantize", fix=fix) from error
    return options


def index_mixing(config: V4Config, options: Options, ops: Ops) -> IndexMixing | None:
    """How index keys become records; None: they are cached as they are, or there are none. Raises CheckpointError
    naming the key of config.json for which there are no published records."""
    if not ops.records:
        return None
    require_widths(config)
    if LayerKind.CSA not in config.layers:
        return None
    matrix = hadamard(config.index_dim) * config.index_dim**-0.5
    return IndexMixing(matrix.to(ops.device), options.power_scales)


def require_widths(config: V4Config) -> None:
    """Rows of 448 + 64 channels; index keys of 128 with 16 to 64 heads, of which up to 2,048 are chosen.

    Raises CheckpointError naming the key of config.json for which there are no published records.
    """
    wanted = {"head_dim": (config.head_dim, (512,)), "qk_rope_head_dim": (config.rope_dim, (64,))}
    if LayerKind.CSA in config.layers:
        wanted["index_head_dim"] = (config.index_dim, (128,))
        wanted["index_n_heads"] = (config.index_heads, (16, 32, 64))
        wanted["index_topk"] = (config.index_topk, range(1, 2049))
    require_records(wanted)
