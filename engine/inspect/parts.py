"""Which part of a model a tensor belongs to. Names only."""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYER = re.compile(r"^layers\.(\d+)\.")


class Part(StrEnum):
    """Parts that a report names."""

    EMBEDDING = "embedding"
    HEAD = "output head"
    ATTENTION = "attention"
    INDEXER = "indexer"
    COMPRESSOR = "compressor"
    EXPERTS = "routed experts"
    SHARED = "shared experts"
    DENSE = "dense layers"
    ROUTER = "router"
    HYPER = "hyper-connections"
    ENGRAM_TABLE = "Engram tables"
    ENGRAM = "Engram projections"
    NORMS = "norms"
    DRAFT = "draft (MTP)"
    VISION = "vision"


_RULES: tuple[tuple[str, Part], ...] = (
    (r"\.experts\.\d+\.", Part.EXPERTS),
    (r"\.engram\.embed\.", Part.ENGRAM_TABLE),
    (r"(^|\.)(embed|embed_tokens)\.(weight|scale)$", Part.EMBEDDING),
    (r"^(head|lm_head)\.|\.shared_head\.head\.", Part.HEAD),
    (r"(^|\.)hc_", Part.HYPER),
    (r"\.indexer\.", Part.INDEXER),
    (r"\.compressor\.", Part.COMPRESSOR),
    (r"\.engram\.", Part.ENGRAM),
    (r"\.shared_experts\.", Part.SHARED),
    (r"\.gate\.", Part.ROUTER),
    (r"\.mlp\.", Part.DENSE),
    (r"\.(attn|self_attn)\.", Part.ATTENTION),
)


def part_of_model(name: str, layers: int) -> Part:
    """The part of an upstream tensor name in a model of `layers` layers. Drafts and vision are parts of their own."""
    if name.startswith(("vision.", "aligner.", "image_")):
        return Part.VISION
    layer = _LAYER.match(name)
    if name.startswith("mtp.") or (layer and int(layer[1]) >= layers):
        return Part.DRAFT
    return _part(_NUMBER.sub("0", name))


@lru_cache(maxsize=4096)
def _part(name: str) -> Part:
    """For the names of all layers and experts at once."""
    return next((part for pattern, part in _RULES if re.search(pattern, name)), Part.NORMS)
