"""No false hits: whatever the keys, a matched block holds exactly the tokens, the tenant and the history asked for."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory import KVMemory
from engine.prefix import KeyChain, PrefixIdentity
from tests.support.promises import Recorder

LOOKUPS = 50_000
ACTIONS = ("cache", "match", "hit", "take", "distrust")
IDENTITY = PrefixIdentity("weights", "layout", "exact", 2)
Prompt = tuple[bytes, tuple[int, ...]]

prompts = st.tuples(st.sampled_from([b"a", b"b"]), st.lists(st.integers(0, 2), min_size=2, max_size=12).map(tuple))
actions = st.lists(st.tuples(st.sampled_from(ACTIONS), prompts), max_size=60)


def colliding_chain(prompt: Prompt, key_values: int) -> KeyChain:
    """A chain whose keys take only a few values, so that they collide at every step; with 0 the real keys."""
    chain = KeyChain(prompt[0], IDENTITY)
    chain.grow(prompt[1])
    if key_values:
        chain.keys = [bytes([key[0] % key_values]) for key in chain.keys]
    return chain


class Model:
    """Remembers what was written into each block, as the bytes of the cache pool would."""

    def __init__(self, key_values: int) -> None:
        self.memory, self.key_values = KVMemory(10, 4, 2), key_values
        self.written: dict[int, Prompt] = {}
        self.anchored: dict[int, Prompt] = {}
        self.hits = self.lookups = self.false = 0

    def cache(self, prompt: Prompt) -> None:
        chain = colliding_chain(prompt, self.key_values)
        if not self.memory.can_take(len(chain.keys), 1):
            return
        blocks, (slot,) = self.memory.take(len(chain.keys), 1)
        for index, block in enumerate(blocks):
            self.written[block] = (prompt[0], prompt[1][: 2 * index + 2])
        self.memory.index.insert(chain, 0, blocks)
        if self.memory.index.anchor(chain, len(blocks) - 1, slot):
            self.anchored[slot] = (prompt[0], prompt[1][: 2 * len(blocks)])
        self.memory.give(blocks, (slot,))

    def match(self, prompt: Prompt) -> None:
        self._compare(prompt, self.memory.index.match(colliding_chain(prompt, self.key_values)))

    def hit(self, prompt: Prompt) -> None:
        hit = self.memory.hit(colliding_chain(prompt, self.key_values), len(prompt[1]))
        self._compare(prompt, hit.blocks)
        if hit.anchor_slot is not None:
            self.false += self.anchored[hit.anchor_slot] != (prompt[0], prompt[1][: 2 * len(hit.blocks)])
            assert 2 * len(hit.blocks) < len(prompt[1])
            self.memory.give(hit.blocks, (hit.anchor_slot,))

    def take(self, prompt: Prompt) -> None:
        count = len(prompt[1]) // 2
        if self.memory.can_take(count):
            blocks, _ = self.memory.take(count)
            for block in blocks:
                self.written.pop(block, None)
            self.memory.give(blocks)

    def distrust(self, prompt: Prompt) -> None:
        chain = colliding_chain(prompt, self.key_values)
        self.memory.index.distrust(chain)
        assert self.memory.index.match(chain) == ()

    def _compare(self, prompt: Prompt, blocks: tuple[int, ...]) -> None:
        self.lookups += 1
        for index, block in enumerate(blocks):
            self.hits += 1
            self.false += self.written[block] != (prompt[0], prompt[1][: 2 * index + 2])


@settings(max_examples=400, deadline=None)
@given(actions=actions, key_values=st.sampled_from([0, 1, 2, 3, 256]))
def test_no_action_sequence_leads_to_a_false_hit(actions: list[tuple[str, Prompt]], key_values: int) -> None:
    model = Model(key_values)
    for name, prompt in actions:
        getattr(model, name)(prompt)
        model.memory.check_idle()
        assert not model.false


@pytest.mark.slow
@pytest.mark.promise(7)
def test_of_50_000_lookups_of_colliding_keys_none_is_a_false_hit(promise: Recorder) -> None:
    random, models = Random(7), list[Model]()
    while sum(model.lookups for model in models) < LOOKUPS:
        models.append(Model(random.choice((1, 2, 3))))
        for _ in range(200):
            tokens = tuple(random.choices(range(3), k=random.randrange(2, 13)))
            getattr(models[-1], random.choice(ACTIONS))((random.choice((b"a", b"b")), tokens))
    hits = sum(model.hits for model in models)
    promise(7, "lookups of keys that all collide", sum(model.lookups for model in models), at_least=LOOKUPS)
    promise(7, f"false hits among {hits} blocks that were hit", sum(model.false for model in models), exactly=0)
    assert hits > LOOKUPS / 100


@settings(max_examples=100, deadline=None)
@given(prompt=prompts)
def test_what_was_cached_last_is_found_whole(prompt: Prompt) -> None:
    model = Model(0)
    model.cache(prompt)
    model.match(prompt)
    assert model.hits == len(prompt[1]) // 2
