"""No false hits in the store: whatever the keys, what is found stands for the tokens and the history asked for.

Salts are not compared: the store never sees them, and equal histories of two tenants have equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.layout import CacheGroup, GroupKind, Layout
from engine.prefix import KeyChain, PrefixIdentity
from services.kvstore.offers import Offer, RecordOffer
from services.kvstore.records import BlockName, Identity, Record, RecordId, RecordKind
from services.kvstore.tier import DramTier

BLOCK_TOKENS, RECORD_BYTES = 2, 64
LAYOUT = Layout(
    BLOCK_TOKENS,
    0,
    (
        CacheGroup("latent", GroupKind.GLOBAL, 1, BLOCK_TOKENS, 1, RECORD_BYTES // BLOCK_TOKENS, "uint8", "1"),
        CacheGroup("window", GroupKind.WINDOW, 1, 2, 1, RECORD_BYTES // 2, "uint8", "1"),
    ),
)
IDENTITY = Identity("weights", LAYOUT.fingerprint)
KEYED = PrefixIdentity("weights", LAYOUT.fingerprint, "exact", BLOCK_TOKENS)
Prompt = tuple[bytes, tuple[int, ...]]

blocks = st.sampled_from([(0, 0), (0, 1), (1, 1)])
histories = st.lists(blocks, min_size=1, max_size=4).map(
    lambda found: tuple(token for block in found for token in block)
)
prompts = st.tuples(st.sampled_from([b"a", b"b"]), histories)
actions = st.lists(st.tuples(st.sampled_from(["put", "get"]), prompts), max_size=40)


class Model:
    """A store that remembers what each record was made from, as its bytes would."""

    def __init__(self, key_values: int) -> None:
        self.tier, self.key_values = DramTier(24 * RECORD_BYTES, lambda: 0.0), key_values
        self.made: dict[RecordId, tuple[int, ...]] = {}
        self.hits = 0

    def names(self, prompt: Prompt) -> list[BlockName]:
        """With few key values they collide at every step, and keys of what continues equal keys are equal again."""
        salt, tokens = prompt
        names, parent = list[BlockName](), bytes(32)
        for first in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = tokens[first : first + BLOCK_TOKENS]
            key = self.key(salt, parent, block)
            names.append(BlockName(key, np.asarray(block, dtype="<u4").tobytes(), parent))
            parent = key
        return names

    def key(self, salt: bytes, parent: bytes, block: tuple[int, ...]) -> bytes:
        chain = KeyChain(salt + parent, KEYED)
        chain.grow(block)
        return bytes([1 + chain.keys[0][0] % self.key_values]) * 32 if self.key_values else chain.keys[0]

    def put(self, prompt: Prompt) -> None:
        records = []
        for name in self.names(prompt):
            for kind in RecordKind:
                assert name.parent is not None
                records.append(RecordOffer(RecordId(kind, name.key), name, name.parent, RECORD_BYTES))
        offer = Offer(tuple(records), IDENTITY, LAYOUT, 0.0)
        for index in offer.wanted(lambda record: self.tier.by_id(record) is not None, self.foreign, 1 << 20):
            self.store(offer.records[index], prompt, index // len(RecordKind) + 1)

    def foreign(self, record: RecordOffer) -> bool:
        here = self.tier.by_id(record.id)
        return here is not None and not here.answers(record.name, IDENTITY)

    def store(self, record: RecordOffer, prompt: Prompt, blocks: int) -> None:
        place = self.tier.take(RECORD_BYTES)
        if place is None:
            return
        parent = None if record.parent == bytes(32) else RecordId(RecordKind.BLOCK, record.parent)
        parent = RecordId(RecordKind.BLOCK, record.id.key) if record.id.kind is RecordKind.ANCHOR else parent
        if parent is not None and self.tier.by_id(parent) is None:  # left meanwhile
            self.tier.give(place)
            return
        named = Record(record.id, IDENTITY, record.name.tokens, record.parent, place, RECORD_BYTES, ())
        if self.tier.admit(named):
            self.made[record.id] = prompt[1][: blocks * BLOCK_TOKENS]

    def get(self, prompt: Prompt) -> None:
        names = self.names(prompt)
        held = self.tier.lookup(names, IDENTITY)
        found = self.tier.collect(names[: held.anchored], IDENTITY, anchor=True) if held.anchored else []
        self.tier.use(found)
        self._compare(prompt, found)

    def _compare(self, prompt: Prompt, found: Sequence[Record]) -> None:
        for index, record in enumerate(found):
            blocks = index + (record.id.kind is RecordKind.BLOCK)
            self.hits += 1
            assert self.made[record.id] == prompt[1][: blocks * BLOCK_TOKENS]


@settings(max_examples=400, deadline=None)
@given(actions=actions, key_values=st.sampled_from([0, 1, 2, 3, 5]))
def test_no_order_of_puts_and_gets_leads_to_a_false_hit(actions: list[tuple[str, Prompt]], key_values: int) -> None:
    model = Model(key_values)
    for name, prompt in actions:
        getattr(model, name)(prompt)


@settings(max_examples=100, deadline=None)
@given(prompt=prompts)
def test_what_was_put_last_is_found_whole(prompt: Prompt) -> None:
    model = Model(0)
    model.put(prompt)
    model.get(prompt)
    assert model.hits == len(prompt[1]) // BLOCK_TOKENS + 1
