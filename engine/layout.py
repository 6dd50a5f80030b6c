"""Cache layout: which groups a model caches and how many bytes each takes. Knows no tensors and no paging."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum

from blake3 import blake3


class GroupKind(StrEnum):
    """GLOBAL entries belong to a block, shared by prefix; WINDOW entries belong to one sequence at one position."""

    GLOBAL = "global"
    WINDOW = "window"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One kind of cached record. An extent is the contiguous `[layers][entries]` records of one block or one slot."""

    name: str
    kind: GroupKind
    layers: int
    entries: (
        int  # GLOBAL: entries per block and layer; WINDOW: ring rows per layer, position p lives in row p % entries
    )
    tokens_per_entry: int  # GLOBAL: the compress rate; WINDOW: 1
    record_bytes: int
    dtype: str
    record_version: str

    def __post_init__(self) -> None:
        for field in ("layers", "entries", "tokens_per_entry", "record_bytes"):
            if getattr(self, field) < 1:
                raise ValueError(f"cache group {self.name!r}: {field} must be at least 1, got {getattr(self, field)}")

    @property
    def extent_bytes(self) -> int:
        """Bytes of one extent."""
        return self.layers * self.entries * self.record_bytes

    def valid_entries(self, tokens: int) -> int:
        """Entries per layer that hold data once `tokens` tokens of the block (GLOBAL) or sequence (WINDOW) exist."""
        if tokens < 0:
            raise ValueError(f"cache group {self.name!r}: tokens must not be negative, got {tokens}")
        return min(tokens // self.tokens_per_entry, self.entries)


@dataclass(frozen=True, slots=True)
class Layout:
    """Every cache group of a model, in pool order: group after group inside a block, and inside a window slot."""

    block_tokens: int
    max_rollback: int  # tokens a sequence may be rolled back without losing ring rows
    groups: tuple[CacheGroup, ...]

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.max_rollback < 0:
            raise ValueError("layout: block_tokens must be at least 1 and max_rollback must not be negative")
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise ValueError(f"layout: cache group names must differ, got {names}")
        for group in self.globals:
            if group.entries * group.tokens_per_entry != self.block_tokens:
                raise ValueError(
                    f"layout: group {group.name!r} must cover exactly {self.block_tokens} tokens per block"
                )

    @property
    def globals(self) -> tuple[CacheGroup, ...]:
        """Groups stored per block."""
        return tuple(group for group in self.groups if group.kind is GroupKind.GLOBAL)

    @property
    def windows(self) -> tuple[CacheGroup, ...]:
        """Groups stored per sequence, in its slot."""
        return tuple(group for group in self.groups if group.kind is GroupKind.WINDOW)

    @property
    def block_bytes(self) -> int:
        """Bytes of all GLOBAL extents of one block."""
        return sum(group.extent_bytes for group in self.globals)

    @property
    def window_bytes(self) -> int:
        """Bytes of all WINDOW extents of one slot."""
        return sum(group.extent_bytes for group in self.windows)

    @property
    def fingerprint(self) -> str:
        """BLAKE3 (hex) of the layout's canonical JSON: two engines exchange records only when it is equal."""
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return blake3(canonical.encode()).hexdigest()

    def group(self, name: str) -> CacheGroup:
        """The group called `name`; KeyError names the groups that exist."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(f"no cache group {name!r}; this layout has {[group.name for group in self.groups]}")

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens occupy, the last one possibly only in part."""
        return -(-tokens // self.block_tokens)
