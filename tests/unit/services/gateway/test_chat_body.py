"""Strict bodies: every field named, typed and bounded, before any work (promise 42)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from fabric.errors import InvalidArgument
from services.gateway.body_faults import read_chat
from services.gateway.chat_body import ChatBody

USER = {"role": "user", "content": "x"}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [USER]} | fields).encode()


def fault(raw: bytes) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        read_chat(raw)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [USER] * 5000}, "messages"),
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"user": 3}, "user"),
        ({"user": "x" * 513}, "user"),
        ({"stop": 5}, "stop"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"n": 2}, "n"),
        ({"n": 10**6}, "n"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a"] * 1000}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": []}, "tool_choice"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"cache_salt": "mine"}, "cache_salt"),
        ({"retention": "week"}, "retention"),
        ({"retention": 2}, "retention"),
        ({"owner": "mine"}, "owner"),
        ({"logit_bias": {}}, "logit_bias"),
    ],
)
def test_a_bad_field_is_named_with_its_fix(fields: dict[str, Any], field: str) -> None:
    error = fault(body(**fields))
    assert error.field == field
    assert error.fix


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"model":' + b"[" * 10_000 + b"]" * 10_000 + b"}"]
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    assert fault(raw).field == "body"


def test_errors_never_quote_a_value() -> None:
    canary = "CANARY9921"
    hostile: list[dict[str, Any]] = [
        {"messages": [{"role": canary, "content": canary}]},
        {"messages": [{"role": "user", "content": {"a": canary}}]},
        {"temperature": canary},
        {"tool_choice": canary},
        {"stop": [canary * 100]},
        {"stop": [canary] * 17},
        {"tools": [{"type": canary}]},
        {"response_format": {"type": canary}},
    ]
    for fields in hostile:
        assert canary not in str(fault(body(**fields)))


def test_temperature_zero_stays_greedy_with_thinking() -> None:
    assert read_chat(body(temperature=0, thinking={"type": "enabled"})).sampling(9).temperature == 0.0


def test_every_sampling_field_reaches_the_engine() -> None:
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 11,
        "max_tokens": 12,
        "min_tokens": 2,
        "ignore_eos": True,
    }
    params = read_chat(body(**asked, stop=["a"], stop_token_ids=[5], logprobs=True, top_logprobs=3)).sampling(1)
    assert {name: getattr(params, name) for name in asked} == asked
    assert (params.stop, params.stop_token_ids, params.logprobs) == (("a",), (5,), 3)


def test_logprobs_alone_asks_for_the_chosen_token() -> None:
    assert read_chat(body(logprobs=True)).sampling(1).logprobs == 0
    assert read_chat(body()).sampling(1).logprobs is None


def test_a_single_stop_string_is_a_list_of_one() -> None:
    assert read_chat(body(stop="END")).sampling(1).stop == ("END",)


def test_an_answer_the_official_client_echoes_is_accepted() -> None:
    call = {"id": "c1", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}
    echoed = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "r",
        "tool_calls": [call],
        "refusal": None,
        "audio": None,
        "function_call": None,
        "annotations": [],
    }
    messages = [USER, echoed, {"role": "tool", "tool_call_id": "c1", "content": "1"}]
    assert len(read_chat(body(messages=messages)).messages) == 3


WRONG: tuple[Any, ...] = (None, True, -1, 2**70, 1.5, float("nan"), "", "x" * 20_000, [], [{}], ["x"] * 5000, {})


@pytest.mark.parametrize("name", ChatBody.model_fields)
def test_whatever_is_wrong_with_a_field_is_told_in_our_words_with_what_is_accepted(name: str) -> None:
    refused = 0
    for value in WRONG:
        raw = body(**{name: value})
        try:
            ChatBody.model_validate_json(raw)
        except ValidationError as theirs:
            refused += 1
            ours = fault(raw)
            assert not any(each["msg"] in str(ours) for each in theirs.errors() if each["type"] != "value_error"), ours
            assert ours.field.startswith(name) and ours.fix and not ours.fix.startswith("see")
    assert refused


def test_how_many_tokens_are_too_many_is_the_models_to_say() -> None:
    """No constant stands before its context: V4's is longer than a million."""
    assert read_chat(body(max_tokens=1_048_576)).output_limit == 1_048_576
    assert read_chat(body(max_completion_tokens=2**31 - 1)).output_limit == 2**31 - 1
