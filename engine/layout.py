"""Cache layout: which groups a model caches and how many bytes each takes. Knows no tensors and no paging."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import lru_cache

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

    @property
    def unpaged(self) -> CacheGroup:
        """What is left of the group when its entries are cut into blocks of another size."""
        return replace(self, entries=1) if self.kind is GroupKind.GLOBAL else self

    def valid_entries(self, tokens: int) -> int:
        """Entries per layer that hold data once `tokens` tokens of the block (GLOBAL) or sequence (WINDOW) exist."""
        if tokens < 0:
            raise ValueError(f"cache group {self.name!r}: tokens must not be negative, got {tokens}")
        return min(tokens // self.tokens_per_entry, self.entries)


@dataclass(frozen=True, slots=True)
class ReplayPolicy:
    """How window rows of a cached prefix come back: kept in anchors, or recomputed from the prefix's last tokens.

    One window of tokens is approximate: its first rows lack what came before. `stacked`: as many windows as there are
    layers, for each layer's rows need those of the layer below one window further back; exact. `decoder`: of a prompt
    only the last `tokens` go through the layers above the last entry source. `handoff`: prefill computes entries alone;
    decode replays the last `tokens` of the prompt and draws the first token.
    """

    tokens: int = 0  # recomputed before the end of a prefix hit; 0: window rows are kept and hits are exact
    decoder: bool = False
    handoff: bool = False
    stacked: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 0 or ((self.decoder or self.handoff or self.stacked) and not self.tokens):
            raise ValueError(f"replay policy: {self.tokens} tokens cannot be replayed")
        if self.stacked and (self.decoder or self.handoff):
            raise ValueError("replay policy: stacked windows need every row of a prompt in every layer")

    @property
    def window_policy(self) -> str:
        """The policy's name, which is part of every prefix key: "exact", "replay" or "recompute"."""
        if not self.tokens:
            return "exact"
        return "recompute" if self.stacked else "replay"

    def start(self, hit_tokens: int) -> int:
        """First position that is computed after a hit of `hit_tokens` tokens."""
        return max(0, hit_tokens - self.tokens)


EXACT = ReplayPolicy()


@dataclass(frozen=True, slots=True)
class Layout:
    """Every cache group of a model, in pool order: group after group inside a block, and inside a window slot."""

    block_tokens: int
    max_rollback: int  # tokens a sequence may be rolled back without losing ring rows
    groups: tuple[CacheGroup, ...]
    replay: ReplayPolicy = EXACT

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
    def anchored(self) -> bool:
        """Whether a cached prefix can be continued only from an anchor: its window groups at exactly that boundary."""
        return bool(self.windows) and not self.replay.tokens

    @property
    def window_policy(self) -> str:
        """How window state comes back at a prefix hit: part of every prefix key."""
        return self.replay.window_policy

    @property
    def block_bytes(self) -> int:
        """Bytes of all GLOBAL extents of one block."""
        return sum(group.extent_bytes for group in self.globals)

    @property
    def window_bytes(self) -> int:
        """Bytes of all WINDOW extents of one slot."""
        return sum(group.extent_bytes for group in self.windows)

    @property
    def largest_extent(self) -> int:
        """Bytes of the largest extent of any group."""
        return max((group.extent_bytes for group in self.groups), default=0)

    @property
    def fingerprint(self) -> str:
        """BLAKE3 (hex) of the layout's canonical JSON: two engines exchange records only when it is equal."""
        return _fingerprint(self)

    @property
    def records_fingerprint(self) -> str:
        """The same for layouts that differ in `block_tokens` alone: one engine can write records for the other.

        What can be rolled back is said by the rows of the windows.
        """
        return _records_fingerprint(self)

    def group(self, name: str) -> CacheGroup:
        """The group called `name`; KeyError names the groups that exist."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(f"no cache group {name!r}; this layout has {[group.name for group in self.groups]}")

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens occupy, the last one possibly only in part."""
        return -(-tokens // self.block_tokens)


# Remembered: every reservation, ticket and receipt compares them, and a process meets few layouts.
@lru_cache(maxsize=64)
def _fingerprint(layout: Layout) -> str:
    return _digest(asdict(layout))


@lru_cache(maxsize=64)
def _records_fingerprint(layout: Layout) -> str:
    return _digest([[asdict(group.unpaged) for group in layout.groups], asdict(layout.replay)])


def _digest(value: object) -> str:
    """BLAKE3 (hex) of canonical JSON."""
    return blake3(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
