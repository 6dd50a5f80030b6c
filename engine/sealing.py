"""Sealing: puts full blocks and window anchors of sequences into the prefix index. Knows when, not how bytes look."""

from __future__ import annotations

from collections.abc import Callable

from engine.memory import KVMemory
from engine.requests import Anchor, SealedBlock, SealedKV
from engine.sequence import Role, Sequence


class Sealer:
    """`copy_slot(source, target)` copies the window groups of one slot to another."""

    def __init__(self, memory: KVMemory, copy_slot: Callable[[int, int], None], anchor_every_blocks: int) -> None:
        self._memory, self._copy_slot, self._every = memory, copy_slot, anchor_every_blocks

    def seal(self, sequence: Sequence, decoding: bool) -> None:
        """Make what the last step completed reusable: full blocks always, the window where an anchor is wanted.

        While decoding only the newest anchor is worth a slot, for the next turn continues from there.
        """
        if not sequence.cache:
            return
        full = sequence.computed_tokens // self._memory.block_tokens
        if full > sequence.sealed_blocks:
            sequence.chain.grow(sequence.tokens)
            fresh = sequence.blocks[sequence.sealed_blocks : full]
            self._memory.index.insert(sequence.chain, sequence.sealed_blocks, fresh)
            sequence.sealed_blocks = full
        if full and sequence.computed_tokens % self._memory.block_tokens == 0:
            self._anchor(sequence, full - 1, decoding)

    def sealed(self, sequence: Sequence) -> SealedKV:
        """The full blocks of a sequence with their keys, and the anchor it holds."""
        chain = sequence.chain
        blocks = tuple(
            SealedBlock(index, chain.keys[index], chain.parent(index), chain.contents[index].tokens, block)
            for index, block in enumerate(sequence.blocks[: sequence.sealed_blocks])
        )
        cached = (sequence.cached_tokens or 0) // self._memory.block_tokens
        anchor = None
        if sequence.anchor_slot is not None:
            key = chain.keys[sequence.anchor_tokens // self._memory.block_tokens - 1]
            anchor = Anchor(sequence.anchor_slot, sequence.anchor_tokens, key)
        return SealedKV(blocks, min(cached, len(blocks)), anchor)

    def _anchor(self, sequence: Sequence, index: int, decoding: bool) -> None:
        """Snapshot the window at the end of block `index`, if the index wants it and a slot can be had without harm."""
        memory = self._memory
        if not memory.index.wants_anchor(sequence.chain, index) or not memory.can_take(0, 1):
            return
        _, (slot,) = memory.take(0, 1)
        assert sequence.slot is not None  # noqa: S101  narrows the type: only running sequences are sealed
        self._copy_slot(sequence.slot, slot)
        memory.index.anchor(sequence.chain, index, slot)
        if sequence.role is Role.PREFILL:
            self._hold(sequence, index, slot)
        else:
            memory.give((), (slot,))
        if decoding:
            self._roll(sequence, index)

    def _hold(self, sequence: Sequence, index: int, slot: int) -> None:
        """A prefill request holds its newest anchor for storing."""
        if sequence.anchor_slot is not None:
            self._memory.give((), (sequence.anchor_slot,))
        sequence.anchor_slot, sequence.anchor_tokens = slot, (index + 1) * self._memory.block_tokens

    def _roll(self, sequence: Sequence, index: int) -> None:
        """Let the anchor of this sequence's previous block go, unless it stands where one belongs anyway."""
        if sequence.rolling_anchor is not None:
            self._memory.index.drop_anchor(sequence.chain, sequence.rolling_anchor)
        sequence.rolling_anchor = None if (index + 1) % self._every == 0 else index
