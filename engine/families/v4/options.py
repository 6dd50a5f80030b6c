"""How V4 is served where its makers leave a choice: the precision of what is cached. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.checkpoint.errors import CheckpointError
from engine.families.rounding import hadamard
from engine.families.serving import flags
from engine.families.v4.config import SWITCHES, LayerKind, V4Config
from engine.families.v4.records import index_fp4, row_fp8


@dataclass(frozen=True, slots=True)
class Options:
    """`fake_quantize`: cached records hold the values their published 8 and 4 bit formats can hold, as trained."""

    fake_quantize: bool = False

    @property
    def mark(self) -> str:
        """What the record versions of this choice end in: other values are other records."""
        return "q" if self.fake_quantize else ""


def parse_options(config: dict[str, Any], parsed: V4Config) -> Options:
    """The `serving` section. Raises CheckpointError naming the key, also for widths that the formats cannot hold."""
    options = Options(**flags(config, SWITCHES))
    if options.fake_quantize:
        try:
            row_fp8(parsed.head_dim, parsed.rope_dim)
            if LayerKind.CSA in parsed.layers:
                hadamard(index_fp4(parsed.index_dim).width)
        except ValueError as error:
            fix = "leave fake_quantize out of `serving`"
            raise CheckpointError(str(error), file="config.json", item="fake_quantize", fix=fix) from error
    return options
