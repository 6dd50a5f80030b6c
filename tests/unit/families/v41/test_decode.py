"""A decode step as a graph holds it, without the host's part: the forward's logits and the forward's cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.batch import Replay
from engine.families.v41.model import V41
from tests.support.tiny import Piece, batch_of, fresh_pool, random_tokens, run_in_chunks
from tests.unit.families.v41.material import DATA, opened

CONTEXTS = (1, 2, 17, 40)


@pytest.fixture(scope="module")
def family() -> V41:
    return opened(DATA / "tiny-q", "reference")


def test_decoding_without_the_host_equals_the_forward(family: V41) -> None:
    expected, found = (fresh_pool(family) for _ in range(2))
    prompts = [random_tokens(context, seed) for seed, context in enumerate(CONTEXTS)]
    for pool in (expected, found):
        for number, prompt in enumerate(prompts):
            run_in_chunks(family, pool, prompt, 64, first_block=8 * number, slot=number)
    for step in range(3):
        pieces = [
            Piece(random_tokens(1, 100 + number), context + step, range(8 * number, 8 * number + 8), number)
            for number, context in enumerate(CONTEXTS)
        ]
        batch = batch_of(pieces)
        assert family.decodes(batch)
        logits = family.decode(family.plan(batch, found), found)
        assert torch.equal(logits, family.forward(batch, expected))
        assert torch.equal(found.blocks, expected.blocks) and torch.equal(found.slots, expected.slots)


@pytest.mark.parametrize(
    ("change", "decodes"),
    [
        (lambda replay: replay, True),
        (lambda replay: replace(replay, hits=np.array([17], np.int32)), False),
        (lambda replay: replace(replay, hits=np.array([16], np.int32)), True),
        (lambda replay: replace(replay, upper=np.array([2], np.int32)), False),
        (lambda replay: replace(replay, upper=np.array([1], np.int32)), True),
    ],
)
def test_a_batch_whose_windows_reach_what_a_replay_left_out_is_not_decoded(
    family: V41, change: Callable[[Replay], Replay], decodes: bool
) -> None:
    """A window of 16 tokens behind a context of 16."""
    none = np.zeros(1, np.int32)
    replay = change(Replay(none, np.full((1, 8), -1, np.int64), none, tokens=16))
    batch = replace(batch_of([Piece([5], 16, range(8), 0)]), replay=replay)
    assert family.decodes(batch) is decodes


def test_an_image_token_is_not_decoded(family: V41) -> None:
    assert not family.decodes(batch_of([Piece([family.config.image_token], 16, range(8), 0)]))
