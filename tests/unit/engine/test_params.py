"""Sampling parameters are refused before any work, with the field and the fix."""

import math
from dataclasses import replace
from typing import Any

import pytest

from engine.errors import InvalidParameter
from engine.sampling.params import SamplingParams

BAD: list[tuple[str, Any]] = [
    *(
        (field, bad)
        for field in ("temperature", "top_p", "min_p", "repetition_penalty")
        for bad in (math.nan, math.inf, -1)
    ),
    *((field, bad) for field in ("presence_penalty", "frequency_penalty") for bad in (math.nan, -2.1, 2.1)),
    ("temperature", 101),
    ("temperature", "1"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -1),
    ("top_k", 1.5),
    ("seed", -1),
    ("seed", 2**64),
    ("max_tokens", 0),
    ("max_tokens", 2**31),
    ("max_tokens", None),
    ("min_tokens", 300),
    ("logprobs", 21),
    ("prompt_logprobs", -1),
    ("ignore_eos", 1),
    ("stop", "text"),
    ("stop", ("",)),
    ("stop", ("x" * 257,)),
    ("stop", tuple("abcdefghijklmnopq")),
    ("stop_token_ids", (100,)),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", (True,)),
    ("stop_token_ids", tuple(range(65))),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda value: repr(value)[:24])
def test_a_bad_value_is_refused_by_name_with_a_fix(field: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as refusal:
        replace(SamplingParams(), **{field: value}).validate(100)
    assert refusal.value.field == field and refusal.value.fix and field in str(refusal.value)


def test_the_limits_themselves_are_accepted() -> None:
    SamplingParams(
        temperature=0, top_p=1, top_k=0, min_p=1, repetition_penalty=10, presence_penalty=-2, frequency_penalty=2,
        seed=2**64 - 1, stop=tuple("abcdefghijklmnop"), stop_token_ids=(0, 99), logprobs=0, prompt_logprobs=20,
        max_tokens=1_000_000, min_tokens=1_000_000, ignore_eos=True,
    ).validate(100)  # fmt: skip


def test_a_missing_seed_comes_from_the_request_id() -> None:
    params = SamplingParams()
    assert params.seed_for("a") == params.seed_for("a") != params.seed_for("b")
    assert replace(params, seed=5).seed_for("a") == 5
