"""Prefix index: which cached blocks continue which prefix, and where exact anchors stand. Knows no tensors."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.blocks import BlockPool
from engine.journal import Journal
from engine.prefix import BlockContent, KeyChain


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached start of a prompt. `anchor_slot` holds the window groups at the end of `blocks`.

    It is None without a hit, and for a model that has no window groups.
    """

    blocks: tuple[int, ...]
    anchor_slot: int | None


@dataclass(slots=True, eq=False)
class _Entry:
    key: bytes
    content: BlockContent
    parent: _Entry | None
    block: int
    used: int
    anchor_slot: int | None = None
    anchor_used: int = 0
    children: set[bytes] = field(default_factory=set)


class PrefixIndex:
    """Key -> block, chained by parent; retains blocks and anchor slots in their pools until they are evicted.

    Unless `anchored`, every block may end a hit, and no anchor is wanted or kept.
    """

    def __init__(self, blocks: BlockPool, slots: BlockPool, anchored: bool = True) -> None:
        self._blocks, self._slots, self._needs_anchor = blocks, slots, anchored
        self._entries: dict[bytes, _Entry] = {}
        self._leaves: list[tuple[int, bytes]] = []  # heap of (last use, key); stale pairs are dropped when popped
        self._anchored: dict[bytes, _Entry] = {}
        self._ticks = 0
        self.journal = Journal()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def keys(self) -> frozenset[bytes]:
        """Keys of every cached block."""
        return frozenset(self._entries)

    @property
    def anchors(self) -> int:
        """Number of anchors held."""
        return len(self._anchored)

    def match(self, chain: KeyChain) -> tuple[int, ...]:
        """Blocks of the longest cached prefix of `chain`, newly used. Tokens, tenant and parents are compared."""
        return tuple(entry.block for entry in self._walk(chain))

    def hit(self, chain: KeyChain, prompt_tokens: int, block_tokens: int) -> PrefixHit:
        """The longest cached prefix that is usable at its end and leaves at least one prompt token to compute."""
        entries = self._walk(chain)
        for count in range(min(len(entries), (prompt_tokens - 1) // block_tokens), 0, -1):
            entry = entries[count - 1]
            if entry.anchor_slot is not None or not self._needs_anchor:
                entry.anchor_used = self._tick()
                return PrefixHit(tuple(entry.block for entry in entries[:count]), entry.anchor_slot)
        return PrefixHit((), None)

    def insert(self, chain: KeyChain, first: int, blocks: Sequence[int]) -> int:
        """Retain held `blocks` as blocks `first..` of `chain`, as far as their prefix is cached; how many were new."""
        entries = self._walk(chain, first + len(blocks))
        known = len(entries)
        for index in range(known, first + len(blocks)):
            if index < first or chain.keys[index] in self._entries:
                break  # no parent here, or another prefix owns this key: the blocks stay private
            entries.append(self._add(chain, index, entries[-1] if entries else None, blocks[index - first]))
        return len(entries) - known

    def wants_anchor(self, chain: KeyChain, index: int) -> bool:
        """Whether block `index` of `chain` is cached and ends without an anchor that it needs."""
        entry = self._find(chain, index)
        return self._needs_anchor and entry is not None and entry.anchor_slot is None

    def anchor(self, chain: KeyChain, index: int, slot: int) -> bool:
        """Retain held `slot` as the anchor at the end of block `index`. False if not wanted there."""
        entry = self._find(chain, index)
        if not self._needs_anchor or entry is None or entry.anchor_slot is not None:
            return False
        self._slots.retain(slot)
        entry.anchor_slot, entry.anchor_used = slot, self._tick()
        self._anchored[entry.key] = entry
        return True

    def anchor_at(self, chain: KeyChain, index: int) -> int | None:
        """Slot of the anchor at the end of block `index`, if there is one."""
        entry = self._find(chain, index)
        return None if entry is None else entry.anchor_slot

    def drop_anchor(self, chain: KeyChain, index: int) -> None:
        """Forget the anchor at the end of block `index`, if there is one."""
        entry = self._find(chain, index)
        if entry is not None:
            self._unanchor(entry)

    def distrust(self, chain: KeyChain) -> None:
        """Forget everything cached of `chain` and whatever continues it: its bytes may be wrong."""
        entries = self._walk(chain)
        if entries:
            self._remove(entries[0])

    def evict_block(self) -> bool:
        """Forget the least recently used leaf that nobody holds; False if no block can be freed."""
        entry = self._coldest_leaf() or next(
            (entry for entry in self._entries.values() if self._blocks.references(entry.block) == 0), None
        )
        if entry is not None:
            self._remove(entry)
        return entry is not None

    def evict_anchor(self) -> bool:
        """Forget the least recently used anchor that nobody holds; False if there is none."""
        idle = (entry for entry in self._anchored.values() if self._slots.references(entry.anchor_slot or 0) == 0)
        entry = min(idle, key=lambda entry: entry.anchor_used, default=None)
        if entry is not None:
            self._unanchor(entry)
        return entry is not None

    def _walk(self, chain: KeyChain, limit: int | None = None) -> list[_Entry]:
        found: list[_Entry] = []
        for key, content in zip(chain.keys[:limit], chain.contents, strict=False):
            entry = self._entries.get(key)
            if entry is None or entry.content != content or entry.parent is not (found[-1] if found else None):
                break
            found.append(entry)
        for entry in reversed(found):  # parents stay younger than their children: leaves leave first
            entry.used = self._tick()
        if found:
            self._queue_leaf(found[-1])
        return found

    def _find(self, chain: KeyChain, index: int) -> _Entry | None:
        """Entry of block `index`, only if the whole chain up to it is the one cached."""
        entries = self._walk(chain, index + 1)
        return entries[index] if len(entries) > index else None

    def _add(self, chain: KeyChain, index: int, parent: _Entry | None, block: int) -> _Entry:
        entry = _Entry(chain.keys[index], chain.contents[index], parent, block, self._tick())
        self._blocks.retain(block)
        self._entries[entry.key] = entry
        self.journal.stored(entry.key)
        if parent is not None:
            parent.children.add(entry.key)
        self._queue_leaf(entry)
        return entry

    def _queue_leaf(self, entry: _Entry) -> None:
        if entry.children:
            return
        heapq.heappush(self._leaves, (entry.used, entry.key))
        if len(self._leaves) > 2 * len(self._entries) + 64:
            self._leaves = [(leaf.used, leaf.key) for leaf in self._entries.values() if not leaf.children]
            heapq.heapify(self._leaves)

    def _coldest_leaf(self) -> _Entry | None:
        skipped: list[tuple[int, bytes]] = []
        found = None
        while self._leaves and found is None:
            used, key = heapq.heappop(self._leaves)
            entry = self._entries.get(key)
            if entry is None or entry.used != used or entry.children:
                continue
            if self._blocks.references(entry.block):
                skipped.append((used, key))
            else:
                found = entry
        for pair in skipped:
            heapq.heappush(self._leaves, pair)
        return found

    def _remove(self, entry: _Entry) -> None:
        """Forget `entry` and everything that continues it: a child without its parent could never be hit."""
        stack = [entry]
        while stack:
            gone = stack.pop()
            stack.extend(self._entries[key] for key in gone.children)
            self._unanchor(gone)
            del self._entries[gone.key]
            self.journal.removed(gone.key)
            self._blocks.forget(gone.block)
        parent = entry.parent
        if parent is not None:
            parent.children.discard(entry.key)
            self._queue_leaf(parent)

    def _unanchor(self, entry: _Entry) -> None:
        if entry.anchor_slot is not None:
            self._slots.forget(entry.anchor_slot)
            entry.anchor_slot = None
            del self._anchored[entry.key]

    def _tick(self) -> int:
        self._ticks += 1
        return self._ticks
