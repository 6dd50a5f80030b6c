"""KV memory: blocks, window slots and the prefix index as one account. Knows ids; the bytes live in the cache pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.blocks import BlockPool
from engine.errors import Exhausted, IntegrityBroken
from engine.index import PrefixHit, PrefixIndex
from engine.prefix import KeyChain


class KVMemory:
    """Takes evict cold prefixes when free ids run out, so `free + cached` is what a request can get.

    `anchored`: the model has window groups, so that a prefix can be used only where an anchor holds them. Where windows
    are replayed instead, `replay_tokens` of every hit are computed again, and shorter hits are none.
    """

    def __init__(
        self, num_blocks: int, num_slots: int, block_tokens: int, anchored: bool = True, replay_tokens: int = 0
    ) -> None:
        self.block_tokens, self.anchored, self._replay_tokens = block_tokens, anchored, replay_tokens
        self.blocks = BlockPool(num_blocks, "kv blocks")
        self.slots = BlockPool(num_slots, "window slots")
        self.index = PrefixIndex(self.blocks, self.slots, anchored)
        self.give_way: Callable[[], bool] = lambda: False  # lets go of what nobody waits for; False: there is nothing

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens occupy."""
        return -(-tokens // self.block_tokens)

    def can_take(self, blocks: int, slots: int = 0) -> bool:
        """Whether `take(blocks, slots)` would succeed now; what nobody waits for is let go of until it would."""
        while not self.fits(blocks, slots):
            if not self.give_way():
                return False
        return True

    def fits(self, blocks: int, slots: int = 0) -> bool:
        """Whether `take(blocks, slots)` would succeed as things are."""
        return blocks <= self.blocks.free + self.blocks.cached and slots <= self.slots.free + self.slots.cached

    def take(self, blocks: int, slots: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Take fresh blocks and slots, evicting as needed. Raises Exhausted and takes nothing if that cannot do."""
        self.can_take(blocks, slots)
        for pool, count in ((self.blocks, blocks), (self.slots, slots)):
            if count > pool.free + pool.cached:
                raise Exhausted(pool.resource, needed=count, free=pool.free + pool.cached)
        while self.blocks.free < blocks and self.index.evict_block():
            pass
        while self.slots.free < slots and self.index.evict_anchor():
            pass
        return self.blocks.take(blocks), self.slots.take(slots)

    def hit(self, chain: KeyChain, prompt_tokens: int) -> PrefixHit:
        """Longest usable prefix, shared to the caller: its blocks and its anchor slot are held until `give`n back."""
        hit = self.look(chain, prompt_tokens)
        self.blocks.share(hit.blocks)
        if hit.anchor_slot is not None:
            self.slots.share((hit.anchor_slot,))
        return hit

    def look(self, chain: KeyChain, prompt_tokens: int) -> PrefixHit:
        """The same, held by nobody."""
        hit = self.index.hit(chain, prompt_tokens, self.block_tokens)
        return hit if len(hit.blocks) * self.block_tokens > self._replay_tokens else PrefixHit((), None)

    def resume(self, hit_tokens: int) -> tuple[int, int]:
        """The hit that must be replayed, 0 for none, and the first token to compute after it."""
        if not self._replay_tokens:
            return 0, hit_tokens
        return hit_tokens, max(0, hit_tokens - self._replay_tokens)

    def match(self, chain: KeyChain) -> tuple[int, ...]:
        """Longest cached prefix whether or not an anchor ends it, shared to the caller."""
        blocks = self.index.match(chain)
        self.blocks.share(blocks)
        return blocks

    def give(self, blocks: Iterable[int], slots: Iterable[int] = ()) -> None:
        """Give one reference of each back."""
        self.blocks.release(blocks)
        self.slots.release(slots)

    def check(self) -> None:
        """Raise IntegrityBroken if either pool lost or doubled an id."""
        self.blocks.check()
        self.slots.check()

    def check_idle(self) -> None:
        """`check`, and raise IntegrityBroken if a request still holds anything: for when no request is alive."""
        self.check()
        if self.blocks.held or self.slots.held:
            raise IntegrityBroken(f"idle, yet {self.blocks.held} blocks and {self.slots.held} slots are held")
