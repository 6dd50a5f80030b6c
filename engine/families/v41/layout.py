"""V4.1's cache groups (KV contract): entries and index keys by ratio, and what a sequence needs at its own position."""

from __future__ import annotations

import math
from dataclasses import replace

from engine.cache.records.blocks import BlockRecord
from engine.families.v41.config import V41Config
from engine.families.v41.options import Options
from engine.families.v41.records import entry_record, index_record, window_record
from engine.layout import CacheGroup, GroupKind, Layout

MAX_ROLLBACK = 8  # tokens; more than any published draft proposes
WINDOW, HISTORY = "window", "engram_classes"
_BYTES = {"float32": 4, "bfloat16": 2}
_LINE = 16  # bytes


def entry_group(ratio: int) -> str:
    """The group of entries that hold `ratio` tokens each."""
    return f"entries_{ratio}"


def index_group(ratio: int) -> str:
    """The group of index keys of those entries."""
    return f"index_{ratio}"


def open_group(ratio: int) -> str:
    """The group of rows whose entry is not complete yet."""
    return f"open_{ratio}"


def v41_layout(config: V41Config, options: Options, dtype: str, block_tokens: int) -> Layout:
    """Layout for records of `dtype`; a block is `block_tokens` raised to a multiple of every ratio in use."""
    schedule = config.schedule
    unit = math.lcm(1, *schedule.ratios)
    block = -(-block_tokens // unit) * unit

    def entries(name: str, ratio: int, width: int) -> CacheGroup:
        version, layers = f"v41.{name}.{dtype}.1{options.mark}", len(schedule.sources(ratio))
        return CacheGroup(name, GroupKind.GLOBAL, layers, block // ratio, ratio, width * _BYTES[dtype], dtype, version)

    def rows(name: str, layers: int, tokens: int, width: int, kind: str) -> CacheGroup:
        version, held = f"v41.{name}.{kind}.1{options.mark}", tokens + MAX_ROLLBACK
        return CacheGroup(name, GroupKind.WINDOW, layers, held, 1, width * _BYTES[kind], kind, version)

    groups = []
    for ratio in schedule.ratios:
        groups.append(entries(entry_group(ratio), ratio, config.head_dim))
        groups.append(entries(index_group(ratio), ratio, config.index_dim))
    groups.append(rows(WINDOW, config.layers, config.window, config.head_dim, dtype))
    for ratio in schedule.ratios:
        if ratio > 1:  # fp32: a pooled entry must not depend on when its rows were computed
            groups.append(rows(open_group(ratio), len(schedule.sources(ratio)), ratio, 2 * config.head_dim, "float32"))
    if config.engram:
        groups.append(rows(HISTORY, 1, config.engram.longest - 1, 1, "float32"))  # class numbers are exact in fp32
    return Layout(block, MAX_ROLLBACK, tuple(groups), options.replay(config.window))


def record_layout(config: V41Config, options: Options, block_tokens: int) -> Layout:
    """Layout for published records: FP8 window rows, FP4 entries and index keys. A block's records of any group are
    whole lines of 16 bytes: kernels read them so."""
    unit = _LINE // 4 * math.lcm(1, *config.schedule.ratios)  # an index key has 68 bytes
    rows = v41_layout(config, options, "float32", -(-block_tokens // unit) * unit)
    kinds: dict[str, BlockRecord] = {WINDOW: window_record(config.head_dim)}
    for ratio in config.schedule.ratios:
        kinds[entry_group(ratio)] = entry_record(config.head_dim)
        kinds[index_group(ratio)] = index_record(config.index_dim)

    def held(group: CacheGroup) -> CacheGroup:
        record = kinds.get(group.name)
        if record is None:
            return group
        return replace(group, record_bytes=record.bytes, dtype="uint8", record_version=record.version)

    return replace(rows, groups=tuple(map(held, rows.groups)))
