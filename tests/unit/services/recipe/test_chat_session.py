"""One chat answer from tokens: events, wire chunks, usage, finish reasons."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fabric.errors import InvalidArgument
from services.recipe.chat_wire import BodyWriter, ChunkWriter, Heading, TokenUsage
from services.recipe.codec import Codec
from services.recipe.deltas import Delta, Kind
from services.recipe.options import ParsingOptions
from services.recipe.parse import ChatSession, End, TextSession
from services.recipe.trim import StopTrim
from tests.support import bytemodel

CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="add">\n'
    '<｜DSML｜ parameter name="a" string="false">12</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
THINKING = ParsingOptions(stage="reasoning_start", tools=True)
USAGE = TokenUsage(10, 4, 9, 0)


def session(
    codec: Codec, parsing: ParsingOptions = THINKING, stream: bool = True, stops: tuple[str, ...] = ()
) -> ChatSession:
    heading = Heading("req-1", "bytes", 1234, parsing.thinking)
    writer = ChunkWriter(heading, include_usage=True) if stream else BodyWriter(heading)
    return ChatSession(codec.chat_parser(parsing, heading.id), StopTrim(stops, codec.silent), writer)


def answer(chat: ChatSession, text: str, reason: str = "stop", stop: str = "") -> tuple[list[Delta], list[Any], End]:
    step = chat.push(bytemodel.encode(text))
    end = chat.finish(reason, stop, USAGE)
    return [*step.deltas, *end.step.deltas], [json.loads(raw) for raw in (*step.wire, *end.step.wire)], end


def test_reasoning_content_and_calls_are_told_apart(codec: Codec) -> None:
    deltas, _, end = answer(session(codec), f"why</think>because{CALL}<｜end▁of▁sentence｜>")
    assert [(delta.kind, delta.text) for delta in deltas] == [
        (Kind.REASONING, "why"),
        (Kind.CONTENT, "because"),
        (Kind.TOOL_CALL, '{"a": 12}'),
    ]
    assert deltas[2].name == "add" and deltas[2].call_id.startswith("call_00_")
    assert (end.reason, end.reasoning_tokens) == ("tool_calls", 3)


def test_reasoning_is_counted_in_tokens_however_the_text_falls(codec: Codec) -> None:
    assert answer(session(codec), "é😀</think>b")[2].reasoning_tokens == 6
    assert answer(session(codec), "é\n\nab", reason="length")[2].reasoning_tokens == 6
    assert answer(session(codec), f"why{CALL}")[2].reasoning_tokens == len("why\n\n<")
    assert answer(session(codec, ParsingOptions(stage="content_continuation")), "ab")[2].reasoning_tokens == 0


def test_call_ids_follow_from_the_request(codec: Codec) -> None:
    first, second = (answer(session(codec), f"</think>{CALL}")[0] for _ in range(2))
    assert first == second


def test_a_call_cut_off_by_length_is_not_a_finished_call(codec: Codec) -> None:
    _, _, end = answer(session(codec), f"</think>{CALL[:80]}", reason="length")
    assert end.reason == "length"


def test_end_of_sentence_is_never_text(codec: Codec) -> None:
    deltas, _, _ = answer(session(codec), "a</think>b<｜end▁of▁sentence｜>")
    assert "".join(delta.text for delta in deltas) == "ab"


def test_chunks_follow_openai(codec: Codec) -> None:
    _, chunks, _ = answer(session(codec), "a</think>b")
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": "", "reasoning_content": None},
        {"content": None, "reasoning_content": "a"},
        {"content": "b", "reasoning_content": None},
        {"content": "", "reasoning_content": None},
    ]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == [] and [chunk["usage"] for chunk in chunks[:-1]] == [None] * 4
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 9,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 4},
        "prompt_cache_hit_tokens": 4,
        "prompt_cache_miss_tokens": 6,
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    assert {(chunk["id"], chunk["model"], chunk["created"]) for chunk in chunks} == {("req-1", "bytes", 1234)}


def test_a_whole_body_says_the_same_at_once(codec: Codec) -> None:
    _, bodies, _ = answer(session(codec, stream=False), f"why</think>because{CALL}")
    assert len(bodies) == 1
    message = bodies[0]["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("because", "why")
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 12}'}
    assert bodies[0]["choices"][0]["finish_reason"] == "tool_calls"
    assert bodies[0]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_without_thinking_no_reasoning_field_appears(codec: Codec) -> None:
    _, bodies, _ = answer(session(codec, ParsingOptions(), stream=False), "plain")
    assert "reasoning_content" not in bodies[0]["choices"][0]["message"]


def test_a_stop_string_is_trimmed_from_reasoning_too(codec: Codec) -> None:
    chat = session(codec, stops=("XYZ",))
    deltas, _, end = answer(chat, "aXYZ", stop="XYZ")
    assert [(delta.kind, delta.text) for delta in deltas] == [(Kind.REASONING, "a")]
    assert end.reason == "stop"


def test_logprobs_travel_with_their_text(codec: Codec) -> None:
    chat = session(codec)
    tokens = bytemodel.encode("a</think>b")
    step = chat.push(tokens, [(-0.25, [(tokens[0], -0.25)]), (-0.5, []), (-0.75, [])])
    reasoning, content = step.deltas
    assert [entry["logprob"] for entry in reasoning.logprobs] == [-0.25]
    assert [entry["logprob"] for entry in content.logprobs] == [-0.75]
    assert json.loads(step.wire[1])["choices"][0]["logprobs"]["reasoning_content"][0]["token"] == "a"


def test_logprobs_must_match_the_tokens(codec: Codec) -> None:
    with pytest.raises(InvalidArgument):
        session(codec).push(bytemodel.encode("ab"), [(-0.5, [])])


def test_plain_text_keeps_control_tokens_as_spelled(codec: Codec) -> None:
    text = TextSession(codec.text_parser(), StopTrim(()))
    step = text.push(bytemodel.encode("a</think>é"))
    assert [delta.text for delta in step.deltas] == ["a</think>é"]
    assert step.wire == ()


def test_plain_text_is_cut_at_whole_characters(codec: Codec) -> None:
    text = TextSession(codec.text_parser(), StopTrim(()))
    tokens = bytemodel.encode("é😀")
    said = ["".join(delta.text for delta in text.push([token]).deltas) for token in tokens]
    assert said == ["", "é", "", "", "", "😀"]
    assert text.finish("stop", "", USAGE).step.deltas == []


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("so</think>one two<｜end▁of▁sentence｜>", "two<｜end▁of▁sentence｜>", "so|one "),
        ("so</think>one<｜end▁of▁sentence｜>two", "ne<｜end▁of▁sentence｜>two", "so|o"),
        ("so sum</think>", "sum</think>", "so |"),
        ("so sum</think>one", "sum</think>one", "so |"),
        ("so</think>one<｜User｜>", "ne<｜User｜>", "so|o"),
        ("so</think>one<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "so|one"),
    ],
)
@pytest.mark.parametrize("tokens_at_a_time", [1, 1000])
def test_a_stop_string_with_control_tokens_is_trimmed(
    codec: Codec, text: str, stop: str, shown: str, tokens_at_a_time: int
) -> None:
    chat, tokens = session(codec, stops=(stop,)), bytemodel.encode(text)
    steps = [chat.push(tokens[at : at + tokens_at_a_time]) for at in range(0, len(tokens), tokens_at_a_time)]
    deltas = [delta for step in (*steps, chat.finish("stop", stop, USAGE).step) for delta in step.deltas]
    said = ["".join(d.text for d in deltas if d.kind is kind) for kind in (Kind.REASONING, Kind.CONTENT)]
    assert "|".join(said) == shown


def test_plain_text_ends_before_a_stop_string_with_control_tokens(codec: Codec) -> None:
    stop = "o<｜end▁of▁sentence｜>t"
    text = TextSession(codec.text_parser(), StopTrim([stop], codec.silent))
    steps = [text.push([token]) for token in bytemodel.encode("ot, two<｜end▁of▁sentence｜>t")]
    steps.append(text.finish("stop", stop, USAGE).step)
    assert "".join(delta.text for step in steps for delta in step.deltas) == "ot, tw"
