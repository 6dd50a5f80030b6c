"""How V2, V3 and V3.2 are served where their makers leave a choice: the precision of index scores. Runs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.cache.records import Record
from engine.checkpoint.errors import CheckpointError
from engine.families.mla.build import index_order
from engine.families.mla.config import SWITCHES, Indexing, MlaConfig
from engine.families.mla.records import index_e8m0, index_fp8
from engine.families.rounding import IndexRounding, hadamard
from engine.families.serving import flags, require_records
from kernels import Ops
from kernels.operands import IndexMixing


@dataclass(frozen=True, slots=True)
class Options:
    """`fp8_index_scores`: V3.2's index keys and queries are rounded to FP8 before they are scored, as published.

    `power_scales`: each scale is a power of two, as the checkpoint's quantization_config.scale_fmt says.
    """

    fp8_index_scores: bool = False
    power_scales: bool = False

    @property
    def mark(self) -> str:
        """What the record versions of this choice end in: another selection gives other records."""
        return ("e" if self.power_scales else "q") if self.fp8_index_scores else ""


def parse_options(config: dict[str, Any], parsed: MlaConfig) -> Options:
    """The `serving` section. Raises CheckpointError naming the key, also for a model that has no such keys."""
    switches = flags(config, SWITCHES)
    quantization = config.get("quantization_config")
    given = quantization.get("scale_fmt") if isinstance(quantization, dict) else None
    options = Options(**switches, power_scales=given == "ue8m0")
    if options.fp8_index_scores:
        if parsed.index is None:
            raise _refusal("the model has no indexer")
        try:
            hadamard(_record(parsed.index, options).width)
        except ValueError as error:
            raise _refusal(str(error)) from error
    return options


def index_rounding(config: MlaConfig, options: Options, ops: Ops) -> IndexRounding | None:
    """How the indexer's numbers are rounded; None: they are not, or records have them rounded."""
    if config.index is None or ops.records or not options.fp8_index_scores:
        return None
    return IndexRounding(ops, _record(config.index, options), index_order(config.index.width, config.rope))


def index_mixing(config: MlaConfig, options: Options, ops: Ops) -> IndexMixing | None:
    """How index keys become records; None: they are cached as they are. Raises CheckpointError naming the key of
    config.json for which there are no published records."""
    if not ops.records:
        return None
    require_widths(config)
    if config.index is None:
        return None
    width = config.index.width
    matrix = hadamard(width)[:, index_order(width, config.rope)] * width**-0.5
    return IndexMixing(matrix.contiguous().to(ops.device), options.power_scales)


def require_widths(config: MlaConfig) -> None:
    """Latents of 512 + 64 channels; index keys of 128 with 16 to 64 heads, of which up to 2,048 are chosen.

    Raises CheckpointError naming the key of config.json for which there are no published records.
    """
    wanted = {"kv_lora_rank": (config.latent_rank, (512,)), "qk_rope_head_dim": (config.rope, (64,))}
    if config.index is not None:
        wanted["index_head_dim"] = (config.index.width, (128,))
        wanted["index_n_heads"] = (config.index.heads, (16, 32, 64))
        wanted["index_topk"] = (config.index.topk, range(1, 2049))
    require_records(wanted)


def _record(index: Indexing, options: Options) -> Record:
    return index_e8m0(index.width) if options.power_scales else index_fp8(index.width)


def _refusal(message: str) -> CheckpointError:
    fix = "leave fp8_index_scores out of `serving`"
    return CheckpointError(message, file="config.json", item="fp8_index_scores", fix=fix)
