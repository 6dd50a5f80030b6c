"""What a family says of a model to those who count rather than run: layers, caches, published formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.layout import Layout

BLOCK_TOKENS = 128
RecordSizes = Callable[[str], int | None]  # cache group -> bytes of one record; None: as the engine's own layout has it


@dataclass(frozen=True, slots=True)
class Facts:
    """One config.json. A family's `facts.read` gives them, and asks a reader for every tensor on its way."""

    family: str
    config: Any  # the family's own
    layers: int  # drafts not counted
    layout: Callable[..., Layout]  # cache groups for records of a type, and, if given, for blocks of so many tokens
    record_layout: Callable[[int], Layout]  # of kv_cache=records; CheckpointError names a width that no record has
    records: Mapping[str, RecordSizes]  # published record formats; a size may raise ValueError where it does not fit
    scale_bytes: int  # of one FP8 block of a published checkpoint
    is_fp8: Callable[[str], bool]  # whether an upstream tensor name is published in FP8
