"""Which part of a model a tensor belongs to, how ranks share it, and how much of it one token uses. Names only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

_EXPERT = re.compile(r"\.experts\.\d+\.")
_LAYER = re.compile(r"^layers\.(\d+)\.")
_BY_HEAD = ("q_proj", "q_b_proj", "kv_b_proj", "o_proj", "wq_b", "wo_a", "wo_b", "attn_sink")


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


class Share(StrEnum):
    """How ranks divide a tensor."""

    EXPERT = "expert"  # whole experts, over --ep
    TENSOR = "tensor"  # rows or columns, over --tp
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor belongs."""

    part: Part
    share: Share


_RULES: tuple[tuple[str, Part, Share], ...] = (
    (r"(^|\.)(embed|embed_tokens)\.(weight|scale)$", Part.EMBEDDING, Share.TENSOR),
    (r"^(head|lm_head)\.|\.shared_head\.head\.", Part.HEAD, Share.TENSOR),
    (r"(^|\.)hc_", Part.HYPER, Share.REPLICATED),
    (r"\.indexer\.", Part.INDEXER, Share.REPLICATED),
    (r"\.compressor\.", Part.COMPRESSOR, Share.REPLICATED),
    (r"\.engram\.", Part.ENGRAM, Share.TENSOR),
    (r"\.shared_experts\.", Part.SHARED, Share.TENSOR),
    (r"\.gate\.", Part.ROUTER, Share.REPLICATED),
    (r"\.mlp\.", Part.DENSE, Share.TENSOR),
    (r"\.(attn|self_attn)\.", Part.ATTENTION, Share.REPLICATED),
)


def place(name: str, layers: int) -> Place:
    """The place of an upstream tensor name in a model of `layers` layers. Drafts and vision are parts of their own."""
    inner = _inner(name)
    if name.startswith(("vision.", "aligner.", "image_")):
        return Place(Part.VISION, Share.REPLICATED)
    layer = _LAYER.match(name)
    if name.startswith("mtp.") or (layer and int(layer[1]) >= layers):
        return Place(Part.DRAFT, inner.share)
    return inner


def _inner(name: str) -> Place:
    if _EXPERT.search(name):
        return Place(Part.EXPERTS, Share.EXPERT)
    if ".engram.embed." in name:
        return Place(Part.ENGRAM_TABLE, Share.TENSOR)
    for pattern, part, share in _RULES:
        if re.search(pattern, name):
            if part is Part.ATTENTION and any(f".{key}" in name for key in _BY_HEAD):
                return Place(part, Share.TENSOR)
            return Place(part, share)
    return Place(Part.NORMS, Share.REPLICATED)
