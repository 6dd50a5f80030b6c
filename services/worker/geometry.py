"""Handoff geometry: where each extent of a prompt lies in a landing. Both sides compute it and trust no other's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.layout import CacheGroup, Layout
from fabric.records import Extent


@dataclass(frozen=True, slots=True)
class Place:
    """One extent before it has a digest. `offset` counts from the start of the landing."""

    group: str
    block: int
    valid_entries: int
    offset: int
    size: int

    def sealed(self, digest: int) -> Extent:
        """The extent with the digest of its bytes."""
        return Extent(self.group, self.block, self.valid_entries, self.offset, self.size, digest)

    def is_of(self, extent: Extent) -> bool:
        """Whether `extent` names exactly this place with exactly this much data."""
        return self == Place(extent.group, extent.block, extent.valid_entries, extent.offset, extent.size)


@dataclass(frozen=True, slots=True)
class Handoff:
    """A prompt of `tokens` tokens of which the receiver already holds the first `held_tokens` (whole blocks).

    Without `windows` the receiver needs none of the window groups: it replays them.

    The landing has the missing blocks in order, the last one possibly only part full, then all window groups:
    [block][group][layer][entry], [group][layer][row].
    """

    layout: Layout
    tokens: int
    held_tokens: int = 0
    windows: bool = True

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 0 <= self.held_tokens <= self.tokens or self.held_tokens % self.layout.block_tokens:
            raise ValueError(f"held tokens must be whole blocks within the prompt: {self.held_tokens} of {self.tokens}")

    @classmethod
    def beyond(cls, layout: Layout, tokens: int, held_tokens: int) -> Handoff:
        """The handoff in blocks of `layout` to a receiver that holds `held_tokens` tokens in whole blocks of its own.

        Raises:
            ValueError: more is held than there is.
        """
        return cls(layout, tokens, held_tokens // layout.block_tokens * layout.block_tokens)

    @property
    def first_block(self) -> int:
        """Index of the first block that has to be written."""
        return self.held_tokens // self.layout.block_tokens

    @property
    def blocks(self) -> int:
        """Blocks of the whole prompt, the tail included."""
        return self.layout.blocks_for(self.tokens)

    @property
    def window_offset(self) -> int:
        """Where the window groups start in the landing."""
        return (self.blocks - self.first_block) * self.layout.block_bytes

    @property
    def landing_bytes(self) -> int:
        """Bytes of the whole landing."""
        return self.window_offset + (self.layout.window_bytes if self.windows else 0)

    def block_places(self, block: int) -> Iterator[Place]:
        """Extents of one block, in pool order."""
        return self._block_places(block, self.layout.globals, self.layout.block_bytes)

    def _block_places(self, block: int, groups: Sequence[CacheGroup], block_bytes: int) -> Iterator[Place]:
        size = self.layout.block_tokens
        tokens = min(size, self.tokens - block * size)
        return _places(groups, block, tokens, (block - self.first_block) * block_bytes)

    def window_places(self) -> Iterator[Place]:
        """Extents of the window groups at the end of the prompt."""
        return _places(self.layout.windows if self.windows else (), 0, self.tokens, self.window_offset)

    def places(self) -> Iterator[Place]:
        """Everything that the receiver needs and does not hold."""
        groups, block_bytes = self.layout.globals, self.layout.block_bytes  # reckoned anew each time they are asked for
        for block in range(self.first_block, self.blocks):
            yield from self._block_places(block, groups, block_bytes)
        yield from self.window_places()


def _places(groups: Sequence[CacheGroup], block: int, tokens: int, start: int) -> Iterator[Place]:
    for group in groups:
        yield Place(group.name, block, group.valid_entries(tokens), start, group.extent_bytes)
        start += group.extent_bytes


def record_places(groups: Sequence[CacheGroup], tokens: int, start: int) -> Iterator[Place]:
    """Extents of one stored record from `start`: a full block's global groups (`tokens` of one block), or the window
    groups of an anchor after `tokens` tokens."""
    return _places(groups, 0, tokens, start)
