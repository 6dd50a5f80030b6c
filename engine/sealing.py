"""Sealing: puts full blocks and window anchors of sequences into the prefix index, and offers them to a store.

Knows when, not how bytes look.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.memory import KVMemory
from engine.offers import Offers
from engine.requests import Anchor, SealedBlock, SealedKV
from engine.sequence import Role, Sequence


class Sealer:
    """`copy_slot(source, target)` copies the window groups of one slot to another.

    Sequences that run offer what they have every `offer_every_blocks` blocks; with 0 only `offer` does.
    """

    def __init__(
        self,
        memory: KVMemory,
        copy_slot: Callable[[int, int], None],
        anchor_every_blocks: int,
        offers: Offers,
        offer_every_blocks: int,
    ) -> None:
        self._memory, self._copy_slot, self._every = memory, copy_slot, anchor_every_blocks
        self._offers, self._offer_every = offers, offer_every_blocks

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
        if self._is_on_grid(sequence, full):
            self.offer(sequence)

    def offer(self, sequence: Sequence) -> None:
        """Offer what is sealed of a sequence, if there is anything new, with the newest anchor."""
        first_new = max(sequence.offered_blocks, sequence.found_blocks)
        if sequence.offer_as is None or sequence.sealed_blocks <= first_new:
            return
        label, blocks = sequence.offer_as, self._blocks(sequence)
        if self._offers.make(sequence.request_id, label, blocks, first_new, self._newest_anchor(sequence)):
            sequence.offered_blocks = sequence.sealed_blocks

    def sealed(self, sequence: Sequence) -> SealedKV:
        """The full blocks of a sequence with their keys, and the anchor it holds."""
        blocks = self._blocks(sequence)
        return SealedKV(blocks, sequence.found_blocks, self._held_anchor(sequence))

    def _is_on_grid(self, sequence: Sequence, full: int) -> bool:
        """Whether a running sequence offers now: where an anchor is needed, at the end of a block of the grid."""
        every = self._offer_every
        if not every or sequence.offer_as is None or full // every <= sequence.offered_blocks // every:
            return False
        ends_there = sequence.computed_tokens == full * self._memory.block_tokens and full % every == 0
        return ends_there or not self._memory.anchored

    def _blocks(self, sequence: Sequence) -> tuple[SealedBlock, ...]:
        chain = sequence.chain
        return tuple(
            SealedBlock(index, chain.keys[index], chain.parent(index), chain.contents[index].tokens, block)
            for index, block in enumerate(sequence.blocks[: sequence.sealed_blocks])
        )

    def _newest_anchor(self, sequence: Sequence) -> Anchor | None:
        """The one at the end of what is sealed, which the prefix index holds; or else the one that is held."""
        index = sequence.sealed_blocks - 1
        slot = self._memory.index.anchor_at(sequence.chain, index)
        if slot is None:
            return self._held_anchor(sequence)
        return Anchor(slot, (index + 1) * self._memory.block_tokens, sequence.chain.keys[index])

    def _held_anchor(self, sequence: Sequence) -> Anchor | None:
        if sequence.anchor_slot is None:
            return None
        key = sequence.chain.keys[sequence.anchor_tokens // self._memory.block_tokens - 1]
        return Anchor(sequence.anchor_slot, sequence.anchor_tokens, key)

    def _anchor(self, sequence: Sequence, index: int, decoding: bool) -> None:
        """Snapshot the window at the end of block `index`, if the index wants it and a slot can be had without harm."""
        memory = self._memory
        if not memory.index.wants_anchor(sequence.chain, index) or not memory.fits(0, 1):
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
