"""What a model's caches cost in each record format: bytes per token and bytes per sequence. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

from engine.families.facts import RecordSizes
from engine.families.inventory import Model
from engine.layout import CacheGroup, GroupKind, Layout


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
    layout, fitting, others = model.facts.layout("bfloat16"), [], {}
    for name, sizes in {"bf16": lambda group: None, **model.facts.records}.items():
        try:
            fitting.append(_cost(name, layout, sizes))
        except ValueError as error:  # channels that are not whole blocks
            others[name] = str(error)
    return tuple(fitting), others


def _cost(name: str, layout: Layout, sizes: RecordSizes) -> CacheCost:
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
