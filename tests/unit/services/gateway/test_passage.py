"""What travels with a request: its tokens, its sampling, and whatever else registers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.params import SamplingParams
from fabric.errors import Internal
from protos.deepinfer.v1 import common_pb2, decode_pb2, prefill_pb2
from services.gateway.job import Prompt
from services.gateway.passage import Opening, Passage

PROMPT = [5, 6, 7]
SAMPLING = SamplingParams(seed=9, prompt_logprobs=2, logprobs=1, max_tokens=50, min_tokens=3, stop=("x",))
batches = st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=12)


class Grammar:
    """A piece as a grammar would be one: its state is a count of what it was shown."""

    def __init__(self) -> None:
        self.shown: list[int] = []

    def confirmed(self, token_ids: Sequence[int]) -> None:
        self.shown.extend(token_ids)

    def pack(self, opening: Opening) -> None:
        opening.sampling.top_k = len(self.shown)


def passage(*more: Grammar) -> Passage:
    return Passage(Prompt(PROMPT, b"", SAMPLING, frozenset({2})), *more)


@given(batches)
@pytest.mark.parametrize("kind", [prefill_pb2.PrefillStart, decode_pb2.DecodeServiceGenerateRequest])
def test_every_life_opens_with_the_prompt_and_all_tokens_before_the_newest(
    kind: type[Opening], taken: list[list[int]]
) -> None:
    grammar = Grammar()
    carried = passage(grammar)
    for batch in taken:
        carried.confirmed(batch)
    tokens = [token for batch in taken for token in batch]
    opening = kind()
    carried.pack(opening)
    assert list(opening.token_ids) == list(carried.token_ids) == PROMPT + tokens[:-1]
    assert opening.emitted_tokens == carried.emitted == max(0, len(tokens) - 1)
    assert grammar.shown == tokens and opening.sampling.top_k == len(tokens)
    assert carried.begun == bool(tokens)


def test_sampling_stays_the_same_but_for_what_the_first_life_has_told() -> None:
    first, later, carried = prefill_pb2.PrefillStart(), prefill_pb2.PrefillStart(), passage()
    carried.pack(first)
    carried.confirmed([8])
    carried.pack(later)
    assert first.sampling.prompt_logprobs == 2 and not later.sampling.HasField("prompt_logprobs")
    first.sampling.ClearField("prompt_logprobs")
    assert first.sampling == later.sampling and later.sampling.seed == 9


def test_the_token_that_the_client_has_is_the_one_that_counts() -> None:
    carried = passage()
    carried.confirmed([8, 9])
    receipt = common_pb2.Receipt(first_token=common_pb2.FirstToken(token_id=33))
    assert carried.repeats and carried.settled(receipt).first_token.token_id == 9
    carried.require_newest([9])
    for wrong in ([8], [9, 9], []):
        with pytest.raises(Internal):
            carried.require_newest(wrong)


def test_to_a_decode_that_replays_every_token_travels_as_computed() -> None:
    carried, opening = passage(), prefill_pb2.PrefillStart()
    carried.confirmed([8, 9])
    carried.to(replays=True)
    carried.pack(opening)
    assert list(opening.token_ids) == [*PROMPT, 8, 9] and opening.emitted_tokens == 2 and not carried.repeats
    replaying = common_pb2.Receipt(replay_from=common_pb2.ReplayFrom(position=1))
    assert carried.settled(replaying) == replaying
    with pytest.raises(Internal):
        carried.settled(common_pb2.Receipt(first_token=common_pb2.FirstToken(token_id=33)))


def test_an_answer_is_over_where_its_newest_token_says_so() -> None:
    carried = passage()
    assert carried.finish() is None
    carried.confirmed([8, 2])
    assert carried.finish() is None, "min_tokens are not reached"
    carried.confirmed([2])
    finish = carried.finish()
    assert finish is not None and (finish.reason, finish.completion_tokens) == (common_pb2.FINISH_REASON_STOP, 3)
