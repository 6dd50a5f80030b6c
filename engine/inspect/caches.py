"""What a model's caches cost in each record format: bytes per token and bytes per sequence. Arithmetic only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.families.mla import records as mla
from engine.families.v4 import records as v4
from engine.families.v41 import records as v41
from engine.inspect.inventory import Model
from engine.layout import CacheGroup, GroupKind, Layout

_Sizes = Callable[[str], int | None]  # cache group -> bytes of one record; None: as the engine's own layout has it


@dataclass(frozen=True, slots=True)
class GroupCost:
    """One cache group. Exactly one of the two costs is not zero."""

    name: str
    kind: str
    layers: int
    tokens_per_entry: int
    record_bytes: int
    bytes_per_token: float  # GLOBAL groups: every token of context
    bytes_per_sequence: int  # WINDOW groups: whatever the length


@dataclass(frozen=True, slots=True)
class CacheCost:
    """One record format. `rollback_bytes` come on top of a sequence's bytes while drafts may still be taken back."""

    format: str
    bytes_per_token: float
    bytes_per_sequence: int
    rollback_bytes: int
    groups: tuple[GroupCost, ...]


def cache_costs(model: Model) -> tuple[tuple[CacheCost, ...], dict[str, str]]:
    """The formats that fit this model, and why each of the others does not."""
    layout, fitting, others = model.layout("bfloat16"), [], {}
    for name, sizes in _formats(model).items():
        try:
            fitting.append(_cost(name, layout, sizes))
        except ValueError as error:  # channels that are not whole blocks
            others[name] = str(error)
    return tuple(fitting), others


def _formats(model: Model) -> Mapping[str, _Sizes]:
    """Published record formats by name, bf16 first."""
    family = {"deepseek_v4": _v4_formats, "deepseek_v41": _v41_formats}.get(model.family, _mla_formats)
    return {"bf16": lambda group: None, **family(model.config)}


def _mla_formats(config: Any) -> Mapping[str, _Sizes]:
    def fp8(group: str) -> int | None:
        if group == "latent":
            return mla.latent_fp8(config.latent_rank, config.rope).bytes
        return mla.index_fp8(config.index.width).bytes

    return {"fp8": fp8}


def _v4_formats(config: Any) -> Mapping[str, _Sizes]:
    def fp8(index: Callable[[int], Any], group: str) -> int | None:
        if group.endswith("_state"):
            return None
        if group == "csa_index":
            return int(index(config.index_dim).bytes)
        return v4.row_fp8(config.head_dim, config.rope_dim).bytes

    return {"fp8, fp4 index": partial(fp8, v4.index_fp4), "fp8, fp8 index": partial(fp8, v4.index_fp8)}


def _v41_formats(config: Any) -> Mapping[str, _Sizes]:
    def canonical(group: str) -> int | None:
        if group == "window":
            return v41.window_record(config.head_dim).bytes
        if group.startswith("entries_"):
            return v41.entry_record(config.head_dim).bytes
        return v41.index_record(config.index_dim).bytes if group.startswith("index_") else None

    def fp8(group: str) -> int | None:
        if group.startswith("index_"):
            return v4.index_fp8(config.index_dim).bytes
        is_row = group == "window" or group.startswith("entries_")
        return v4.row_fp8(config.head_dim, config.rope_dim).bytes if is_row else None

    return {"fp4, fp8 window": canonical, "V4's fp8 rows": fp8}


def _cost(name: str, layout: Layout, sizes: _Sizes) -> CacheCost:
    groups = tuple(_group(group, sizes(group.name) or group.record_bytes, layout) for group in layout.groups)
    windows = zip(layout.groups, groups, strict=True)
    spare = sum(g.layers * cost.record_bytes for g, cost in windows if g.kind is GroupKind.WINDOW)
    return CacheCost(
        format=name,
        bytes_per_token=sum(group.bytes_per_token for group in groups),
        bytes_per_sequence=sum(group.bytes_per_sequence for group in groups),
        rollback_bytes=spare * layout.max_rollback,
        groups=groups,
    )


def _group(group: CacheGroup, record: int, layout: Layout) -> GroupCost:
    is_global = group.kind is GroupKind.GLOBAL
    rows = group.entries - layout.max_rollback
    return GroupCost(
        name=group.name,
        kind=group.kind.value,
        layers=group.layers,
        tokens_per_entry=group.tokens_per_entry,
        record_bytes=record,
        bytes_per_token=group.layers * record / group.tokens_per_entry if is_global else 0.0,
        bytes_per_sequence=0 if is_global else group.layers * rows * record,
    )
