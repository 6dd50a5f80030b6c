"""Offers: sealed blocks that outlive their request until a store has them. Knows ids and a clock; never sees bytes.

Nobody waits for an offer. Memory that a request needs is taken from waiting offers before any request loses some.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.layout import Layout
from engine.memory import KVMemory
from engine.requests import Anchor, SealedBlock


@dataclass(frozen=True, slots=True)
class OfferPolicy:
    """Bounds of what waits for a store, and how often a request that still runs offers what it has.

    At most `most` offers wait, and `most_bytes` of what is new in them, each for `hold_s` seconds from when it was
    made. A request that runs offers at a grid of blocks so wide that the anchors there take at most `anchor_share`
    bytes for each byte of blocks; 0: it offers at its end alone.
    """

    most: int = 8
    most_bytes: int = 128 << 20
    hold_s: float = 10.0
    anchor_share: float = 0.125
    least_every_blocks: int = 16

    def __post_init__(self) -> None:
        if min(self.most, self.most_bytes, self.least_every_blocks) < 1 or self.hold_s <= 0 or self.anchor_share < 0:
            raise ValueError(f"offer policy: every bound must be positive, got {self}")

    def every_blocks(self, layout: Layout, anchor_grid: int) -> int:
        """Blocks between two offers of a running request, a multiple of `anchor_grid` where anchors are wanted."""
        if not self.anchor_share:
            return 0
        if not layout.anchored:
            return self.least_every_blocks
        apart = -(-layout.window_bytes // max(1, round(self.anchor_share * layout.block_bytes)))
        return -(-max(apart, self.least_every_blocks) // anchor_grid) * anchor_grid


STANDARD = OfferPolicy()


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks of one prefix from its start, and anchors among them; all held until the offer is dropped."""

    offer_id: int
    request_id: str
    label: object  # what the request said of its blocks: the store's to understand
    blocks: tuple[SealedBlock, ...]
    first_new: int  # blocks before it were offered earlier, or came from elsewhere
    anchors: tuple[Anchor, ...]
    until_s: float  # of the engine's clock: from then on nobody should hold it


@dataclass(slots=True)
class OfferCounts:
    """What became of offers since the engine opened; those that a store was given are not counted here."""

    refused: int = 0  # too many waited already
    late: int = 0  # nobody took it in time
    taken_back: int = 0  # a request needed the memory


class Offers:
    """Owns one reference to every block and anchor slot of its offers."""

    def __init__(self, memory: KVMemory, layout: Layout, policy: OfferPolicy, clock: Callable[[], float]) -> None:
        self._memory, self._layout, self._policy, self._clock = memory, layout, policy, clock
        self._waiting: dict[int, Offer] = {}  # oldest first
        self._taken: dict[int, Offer] = {}
        self._made = 0
        self.counts = OfferCounts()
        self.has_news = False  # something waits that did not when this was last set to False

    def __len__(self) -> int:
        return len(self._waiting) + len(self._taken)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are new in what waits."""
        return sum(self._new_bytes(offer) for offer in self._waiting.values())

    def make(
        self, request_id: str, label: object, blocks: tuple[SealedBlock, ...], first_new: int, anchor: Anchor | None
    ) -> bool:
        """Offer `blocks`, all held by somebody. It replaces what waits of the same request; False beyond the bounds."""
        self._made += 1
        anchors = () if anchor is None else (anchor,)
        until_s = self._clock() + self._policy.hold_s
        offer = Offer(self._made, request_id, label, blocks, first_new, anchors, until_s)
        earlier = next((one for one in self._waiting.values() if one.request_id == request_id), None)
        if earlier is not None:
            offer = _joined(earlier, offer)
        if not self._has_room(offer, earlier):
            self.counts.refused += 1
            return False
        self._share(offer)
        if earlier is not None:
            self._give(self._waiting.pop(earlier.offer_id))
        self._waiting[offer.offer_id] = offer
        self.has_news = True
        return True

    def take(self) -> Offer | None:
        """The oldest that waits, from now on held until `drop`; those that waited for too long are dropped."""
        now = self._clock()
        while self._waiting:
            offer = next(iter(self._waiting.values()))
            if offer.until_s > now:
                self._taken[offer.offer_id] = offer  # first: a drain counts both from another thread, and must see it
                del self._waiting[offer.offer_id]
                return offer
            del self._waiting[offer.offer_id]
            self.counts.late += 1
            self._give(offer)
        return None

    def drop(self, offer_id: int) -> None:
        """Let go of an offer that was taken. Idempotent."""
        offer = self._taken.pop(offer_id, None)
        if offer is not None:
            self._give(offer)

    def forget(self, request_id: str) -> None:
        """Drop what waits of a request whose blocks are not to be trusted."""
        for offer in [one for one in self._waiting.values() if one.request_id == request_id]:
            self._give(self._waiting.pop(offer.offer_id))

    def give_way(self) -> bool:
        """Drop the newest waiting offer that holds something nobody else does; False if there is none."""
        for offer in reversed(self._waiting.values()):
            if self._is_alone_with_some(offer):
                self.counts.taken_back += 1
                self._give(self._waiting.pop(offer.offer_id))
                return True
        return False

    def _has_room(self, offer: Offer, earlier: Offer | None) -> bool:
        """Whether `offer`, in place of `earlier`, stays within the bounds. A lone one does, however large it is."""
        others = [one for one in self._waiting.values() if one is not earlier]
        total = sum(map(self._new_bytes, (*others, offer)))
        return not others or (len(others) < self._policy.most and total <= self._policy.most_bytes)

    def _is_alone_with_some(self, offer: Offer) -> bool:
        blocks, slots = self._memory.blocks, self._memory.slots
        return any(blocks.references(one.block) == 1 for one in offer.blocks) or any(
            slots.references(anchor.slot) == 1 for anchor in offer.anchors
        )

    def _new_bytes(self, offer: Offer) -> int:
        fresh = len(offer.blocks) - offer.first_new
        return fresh * self._layout.block_bytes + len(offer.anchors) * self._layout.window_bytes

    def _share(self, offer: Offer) -> None:
        self._memory.blocks.share(one.block for one in offer.blocks)
        self._memory.slots.share(anchor.slot for anchor in offer.anchors)

    def _give(self, offer: Offer) -> None:
        self._memory.give((one.block for one in offer.blocks), (anchor.slot for anchor in offer.anchors))


def _joined(earlier: Offer, later: Offer) -> Offer:
    """All of both. One that was preempted may have fewer blocks than before."""
    keys = {anchor.key for anchor in later.anchors}
    anchors = (*(anchor for anchor in earlier.anchors if anchor.key not in keys), *later.anchors)
    blocks = max(later.blocks, earlier.blocks, key=len)
    return replace(later, blocks=blocks, first_new=min(earlier.first_new, later.first_new), anchors=anchors)
