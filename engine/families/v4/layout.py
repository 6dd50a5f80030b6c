"""V4's cache groups (KV contract): entries shared by prefix, and what each sequence needs at its own position.

Or published records: an entry's or a window row's 576 bytes and, in a group of its own so that a block has either in
one piece, its 8 bytes of scales; of a mixed index key its 128 codes, and its scale in a group of its own.
"""

from __future__ import annotations

import math
from dataclasses import replace

from engine.families.v4.config import LayerKind, V4Config
from engine.families.v4.records import index_fp8, row_fp8
from engine.layout import CacheGroup, GroupKind, Layout

MAX_ROLLBACK = 8  # tokens; more than any published draft proposes
WINDOW, CSA, HCA, INDEX = "window", "csa", "hca", "csa_index"
SCALE, SCALE_BYTES = "_scale", 8  # of groups of scales: what their names end in; bytes of a row or entry
_BYTES = {"float32": 4, "bfloat16": 2}


def v4_layout(
    config: V4Config, dtype: str, block_tokens: int, max_rollback: int = MAX_ROLLBACK, mark: str = ""
) -> Layout:
    """Layout for KV records of `dtype`; a block is `block_tokens` raised to a multiple of every rate in use.

    `mark` ends the record versions: records of marked and unmarked engines are not exchanged.
    """
    unit = math.lcm(1, *config.rates)
    block = -(-block_tokens // unit) * unit
    key, index_key = config.head_dim, config.index_dim
    csa, hca = config.layers.count(LayerKind.CSA), config.layers.count(LayerKind.HCA)

    def entries(name: str, layers: int, rate: int, width: int) -> CacheGroup:
        record = width * _BYTES[dtype]
        version = f"v4.{name}.{dtype}.1{mark}"
        return CacheGroup(name, GroupKind.GLOBAL, layers, block // rate, rate, record, dtype, version)

    def rows(name: str, layers: int, tokens: int, width: int, kind: str) -> CacheGroup:
        version = f"v4.{name}.{kind}.1{mark}"
        return CacheGroup(name, GroupKind.WINDOW, layers, tokens + max_rollback, 1, width * _BYTES[kind], kind, version)

    groups = []
    if csa:
        groups += [entries("csa", csa, config.csa_rate, key), entries("csa_index", csa, config.csa_rate, index_key)]
    if hca:
        groups.append(entries("hca", hca, config.hca_rate, key))
    groups.append(rows("window", len(config.layers), config.window, key, dtype))
    # Open compressor rows stay fp32: the pooled entry must not depend on when its rows were computed.
    if csa:
        overlap = 2 * config.csa_rate  # the window that is open and the one before it
        groups.append(rows("csa_state", csa, overlap, 4 * key, "float32"))
        groups.append(rows("csa_index_state", csa, overlap, 4 * index_key, "float32"))
    if hca:
        groups.append(rows("hca_state", hca, config.hca_rate, 2 * key, "float32"))
    return Layout(block, max_rollback, tuple(groups))


def record_layout(config: V4Config, block_tokens: int, powers: bool) -> Layout:
    """Layout for published records; `powers`: scales of index keys are powers of two, which are other numbers.

    Groups whose records are whole lines of 16 bytes come first: kernels read them 16 bytes at a time.
    """
    rows = v4_layout(config, "float32", block_tokens)
    row = row_fp8(config.head_dim, config.rope_dim)
    codes, scales, open_rows = [], [], []
    for group in rows.groups:
        if group.name == INDEX:
            key = index_fp8(config.index_dim)
            version = key.version + (".e" if powers else "")
            codes.append(_held(group, "", config.index_dim, f"{version}.codes"))
            scales.append(_held(group, SCALE, key.bytes - config.index_dim, f"{version}.scale", "float32"))
        elif group.name in (WINDOW, CSA, HCA):
            codes.append(_held(group, "", row.bytes - SCALE_BYTES, f"{row.version}.row"))
            scales.append(_held(group, SCALE, SCALE_BYTES, f"{row.version}.scales"))
        else:
            open_rows.append(group)
    scales.sort(key=lambda group: -group.entries)
    return replace(rows, groups=(*codes, *scales, *open_rows))


def _held(group: CacheGroup, behind: str, size: int, version: str, dtype: str = "uint8") -> CacheGroup:
    return replace(group, name=group.name + behind, record_bytes=size, dtype=dtype, record_version=version)


def draft_layout(main: Layout, blocks: int) -> Layout:
    """Layout of the caches of `blocks` MTP blocks: window rows like those of the model, in blocks like its own."""
    held = [group for group in main.groups if group.name in (WINDOW, WINDOW + SCALE)]
    return Layout(main.block_tokens, main.max_rollback, tuple(replace(group, layers=blocks) for group in held))
