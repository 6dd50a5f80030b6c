"""The cache groups of V2, V3 and V3.2 (KV contract): one row per token and layer, nothing that belongs to a position.

Rotary channels are kept in interleaved pairs, in `latent` behind the latent, in `index_key` at the end of the key.

Or published records: the latent's 656 bytes, and of a mixed index key its codes and, in a group of its own so that a
block has codes and scales each in one piece, its scale.
"""

from __future__ import annotations

from dataclasses import replace

from engine.families.mla.config import MlaConfig
from engine.families.mla.records import index_fp8, latent_fp8
from engine.layout import CacheGroup, GroupKind, Layout

INDEX_KEY, INDEX_SCALE = "index_key", "index_scale"
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
        groups.append(rows(INDEX_KEY, config.index.width))
    return Layout(block_tokens, block_tokens, tuple(groups))


def record_layout(config: MlaConfig, block_tokens: int, powers: bool) -> Layout:
    """Layout for published records; `powers`: scales of index keys are powers of two, which are other numbers."""
    layers, width = len(config.dense), config.index.width if config.index else 0
    latent, key = latent_fp8(config.latent_rank, config.rope), index_fp8(width) if width else None

    def rows(name: str, size: int, dtype: str, version: str) -> CacheGroup:
        return CacheGroup(name, GroupKind.GLOBAL, layers, block_tokens, 1, size, dtype, version)

    groups = [rows("latent", latent.bytes, "uint8", latent.version)]
    if key is not None:
        version = key.version + (".e" if powers else "")
        groups.append(rows(INDEX_KEY, width, "uint8", f"{version}.codes"))
        groups.append(rows(INDEX_SCALE, key.bytes - width, "float32", f"{version}.scale"))
    return Layout(block_tokens, block_tokens, tuple(groups))


def draft_layout(main: Layout, blocks: int) -> Layout:
    """Layout of the caches of `blocks` MTP blocks: rows like those of the model's layers, in blocks like its own."""
    return replace(main, groups=tuple(replace(group, layers=blocks) for group in main.groups))
