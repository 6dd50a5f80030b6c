"""The cache groups of V2, V3 and V3.2 (KV contract): one row per token and layer, nothing that belongs to a position.

Rotary channels are kept in interleaved pairs, in `latent` behind the latent, in `index_key` at the end of the key.
"""

from __future__ import annotations

from dataclasses import replace

from engine.families.mla.config import MlaConfig
from engine.layout import CacheGroup, GroupKind, Layout

_BYTES = {"float32": 4, "bfloat16": 2}


def mla_layout(config: MlaConfig, dtype: str, block_tokens: int, mark: str = "") -> Layout:
    """Layout for KV records of `dtype`. Without window groups a sequence can be rolled back to any position.

    `mark` ends the record versions: records of marked and unmarked engines are not exchanged.
    """
    layers = len(config.dense)

    def rows(name: str, width: int) -> CacheGroup:
        version = f"mla.{name}.{dtype}.1{mark}"
        return CacheGroup(name, GroupKind.GLOBAL, layers, block_tokens, 1, width * _BYTES[dtype], dtype, version)

    groups = [rows("latent", config.latent_rank + config.rope)]
    if config.index is not None:
        groups.append(rows("index_key", config.index.width))
    return Layout(block_tokens, block_tokens, tuple(groups))


def draft_layout(main: Layout, blocks: int) -> Layout:
    """Layout of the caches of `blocks` MTP blocks: rows like those of the model's layers, in blocks like its own."""
    return replace(main, groups=tuple(replace(group, layers=blocks) for group in main.groups))
