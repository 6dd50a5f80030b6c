"""Accepted guesses are counted against what the model says two tokens on, row for row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bench.draft import acceptance
from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from engine.families.draft import Drafted
from engine.layout import CacheGroup, GroupKind, Layout

VOCABULARY = 10
LAYOUT = Layout(4, 0, (CacheGroup("window", GroupKind.WINDOW, 1, 1, 1, 4, "float32", "1"),))


def counting(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(values.long() % VOCABULARY, VOCABULARY).float()


class CountingDraft:
    """The model says the token plus 1; the draft guesses so as well, but after a token that 3 divides."""

    layout, blocks = LAYOUT, 1

    def follow(self, batch: RaggedBatch, cache: CachePool) -> Drafted:
        tokens = torch.from_numpy(batch.tokens)
        return Drafted(counting(tokens + 1)[torch.from_numpy(batch.logit_rows)], tokens[:, None].float())

    def forward(self, batch: RaggedBatch, hidden: torch.Tensor, cache: CachePool, depth: int = 0) -> Drafted:
        tokens = torch.from_numpy(batch.tokens)
        assert torch.equal(hidden[:, 0] + 1, tokens.float()), "each state goes with the token after it"
        guesses = counting(tokens + 1 + (tokens % 3 == 0))
        return Drafted(guesses[torch.from_numpy(batch.logit_rows)], hidden)


FAMILY = SimpleNamespace(layout=LAYOUT, max_context_tokens=12)


def test_every_generated_token_but_the_first_is_judged() -> None:
    taken = acceptance(FAMILY, CountingDraft(), [1, 2], 6, torch.float32)  # generates 3, 4, 5, 6, 7, 8
    assert taken == [False, True, True, False, True]


def test_more_tokens_than_the_model_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="13 tokens"):
        acceptance(FAMILY, CountingDraft(), [1, 2], 11, torch.float32)
