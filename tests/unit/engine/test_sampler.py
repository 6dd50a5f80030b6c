"""Sampler."""

from dataclasses import replace

import numpy as np
import pytest

from engine.sampling.logprobs import token_logprobs
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Row, choose

VOCAB = 12
LOGITS = np.linspace(-2.0, 2.0, VOCAB, dtype=np.float32)
GREEDY = SamplingParams(temperature=0.0)
MIXED = [
    GREEDY,
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(top_k=3, frequency_penalty=0.5),
    SamplingParams(min_p=0.2, repetition_penalty=1.3),
    SamplingParams(temperature=2.0, top_k=7, top_p=0.9, min_p=0.05, presence_penalty=1.0),
    SamplingParams(min_tokens=9, stop_token_ids=(11,), logprobs=4),
]


def row(params: SamplingParams, draw: int = 0, seed: int = 3) -> Row:
    return Row(params, seed, (1, 2), [4] * draw)


def drawn(params: SamplingParams, draws: int) -> np.ndarray:
    """How often each token comes out in `draws` independent draws at output length 0."""
    rows = [row(params, seed=seed) for seed in range(draws)]
    tokens = [choice.token for choice in choose(np.tile(LOGITS, (draws, 1)), rows, ())]
    return np.bincount(np.array(tokens), minlength=VOCAB)


def expected(keep: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    weights = np.where(keep, np.exp(LOGITS.astype(np.float64) / temperature), 0.0)
    return weights / weights.sum()


SORTED_MASS = np.cumsum(np.sort(expected(np.ones(VOCAB, bool)))[::-1])
PLAIN = expected(np.ones(VOCAB, bool))


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        (SamplingParams(), PLAIN),
        (SamplingParams(temperature=0.5), expected(np.ones(VOCAB, bool), 0.5)),
        (SamplingParams(top_k=4), expected(np.arange(VOCAB) >= VOCAB - 4)),
        (SamplingParams(top_p=0.7), expected(np.arange(VOCAB) >= VOCAB - 1 - np.searchsorted(SORTED_MASS, 0.7))),
        (SamplingParams(min_p=0.3), expected(0.3 * PLAIN.max() <= PLAIN)),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p"],
)
def test_tokens_follow_the_distribution_that_was_asked_for(params: SamplingParams, wanted: np.ndarray) -> None:
    draws = 6000
    counts, possible = drawn(params, draws), wanted > 0
    assert counts[~possible].sum() == 0
    statistic = ((counts - draws * wanted)[possible] ** 2 / (draws * wanted[possible])).sum()
    assert statistic < 31.3  # chi-square at p = 0.001 for 11 degrees of freedom, the most any case has


def test_a_wrong_distribution_would_be_noticed() -> None:
    counts, wanted = drawn(SamplingParams(temperature=0.8), 6000), PLAIN
    assert ((counts - 6000 * wanted) ** 2 / (6000 * wanted)).sum() > 31.3


def test_a_token_does_not_depend_on_the_rest_of_the_batch() -> None:
    generator = np.random.default_rng(5)
    logits = generator.normal(0, 3, (len(MIXED) * 4, 997)).astype(np.float32)
    rows = [row(params, draw=index % 4, seed=index) for index, params in enumerate(MIXED * 4)]
    together = choose(logits, rows, (0,))
    for index in range(len(rows)):
        assert choose(logits[index : index + 1], rows[index : index + 1], (0,)) == together[index : index + 1]
    assert choose(logits[::-1], rows[::-1], (0,))[::-1] == together


def test_each_draw_of_a_seed_is_its_own() -> None:
    rows = [row(SamplingParams(), draw) for draw in range(64)]
    tokens = [choice.token for choice in choose(np.zeros((64, 997), dtype=np.float32), rows, ())]
    assert len(set(tokens)) > 50


def test_a_row_with_a_nan_or_infinity_fails_alone() -> None:
    logits = np.tile(LOGITS, (4, 1))
    logits[1, 5], logits[2, 0] = np.nan, np.inf
    tokens = [choice.token for choice in choose(logits, [row(GREEDY)] * 4, ())]
    assert tokens == [11, None, None, 11]
    assert [choice.token for choice in choose(logits[1:2], [row(GREEDY)], ())] == [None]


def test_end_and_stop_tokens_are_masked_until_min_tokens() -> None:
    params = replace(GREEDY, min_tokens=2, stop_token_ids=(10,))
    tokens = [choose(LOGITS[None], [row(params, draw)], (11,))[0].token for draw in range(3)]
    assert tokens == [9, 9, 11]


def test_penalties_act_on_what_was_seen() -> None:
    output = [11, 11, 11]
    for params, token in (
        (replace(GREEDY, presence_penalty=2.0), 10),
        (replace(GREEDY, frequency_penalty=0.1), 11),
        (replace(GREEDY, frequency_penalty=0.2), 10),
        (replace(GREEDY, repetition_penalty=5.0), 10),
    ):
        assert choose(LOGITS[None], [Row(params, 0, (), output)], ())[0].token == token
    assert choose(LOGITS[None], [Row(replace(GREEDY, repetition_penalty=5.0), 0, (10,), [11])], ())[0].token == 9
    assert choose(LOGITS[None], [Row(replace(GREEDY, presence_penalty=2.0), 0, (11,), [])], ())[0].token == 11


def test_the_smallest_temperature_is_as_good_as_greedy() -> None:
    assert choose(LOGITS[None], [row(SamplingParams(temperature=5e-324))], ())[0].token == 11


def test_repetition_makes_negative_scores_more_negative() -> None:
    logits = np.array([[-1.0, -1.1]], dtype=np.float32)
    assert choose(logits, [Row(replace(GREEDY, repetition_penalty=2.0), 0, (0,), [])], ())[0].token == 1


def test_logprobs_are_the_models_own_best_first() -> None:
    params = SamplingParams(temperature=0.3, top_k=1, frequency_penalty=2.0, logprobs=3)
    choice = choose(LOGITS[None], [Row(params, 0, (), [11] * 5)], ())[0]
    assert choice.logprob is not None and choice.logprob.token == 10
    assert choice.logprob.logprob == pytest.approx(np.log(PLAIN[10]))
    assert [token for token, _ in choice.logprob.top] == [11, 10, 9]
    assert choice.logprob.top[0][1] == pytest.approx(np.log(PLAIN[11]))


def test_logprobs_order_equals_by_token() -> None:
    (entry,) = token_logprobs(np.zeros((1, 6), dtype=np.float32), [4], [3])
    assert entry.logprob == pytest.approx(-np.log(6)) and entry.rank == 5
    assert [token for token, _ in entry.top] == [0, 1, 2]


def test_the_rank_of_a_token_counts_the_whole_vocabulary() -> None:
    rng = np.random.default_rng(5)
    logits = rng.integers(-4, 4, (40, 30)).astype(np.float32)  # many of them equal
    tokens = rng.integers(0, 30, 40).tolist()
    for row, token, entry in zip(logits, tokens, token_logprobs(logits, tokens, [6] * 40), strict=True):
        order = sorted(range(30), key=lambda other: (-row[other], other))
        assert entry.rank == order.index(token) + 1
        assert [other for other, _ in entry.top] == order[:6]
