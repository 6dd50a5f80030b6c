"""Answers of models with a chat template: reasoning, content and calls, told by control tokens alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from fabric.errors import InvalidArgument
from services.recipe import choice
from services.recipe.chat_wire import BodyWriter, Heading, TokenUsage
from services.recipe.deltas import Delta, Kind, coalesce
from services.recipe.dialect import Dialect
from services.recipe.options import ParsingOptions
from services.recipe.parse import ChatSession
from services.recipe.settings import RecipeSettings
from services.recipe.trim import StopTrim
from tests.support import templatemodel as given

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, SEP, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
V3_CALL = f'{OPEN}function{SEP}add\n```json\n{{"a": "<é>"}}\n```{CLOSE}'
V31_CALL = f'{OPEN}sub{SEP}{{"b": 2}}{CLOSE}'
THINKING = ParsingOptions(stage="reasoning_start", tools=True)
PLAIN = ParsingOptions(tools=True)


@pytest.fixture(scope="module")
def dialect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dialect]:
    folder = given.write(tmp_path_factory.mktemp("model") / "m", given.R1)
    opened = choice.open_dialect(RecipeSettings(discovery="memory://x", model=folder))
    yield opened
    for process in opened.processes:
        process.close()


def told(dialect: Dialect, text: str, parsing: ParsingOptions) -> list[Delta]:
    parser = dialect.chat_parser(parsing, "req-1")
    return coalesce([*parser.push(given.encode(text)), *parser.finish().deltas])


def pieces(deltas: list[Delta]) -> list[tuple[str, str, str]]:
    return [(delta.kind.value, delta.name, delta.text) for delta in deltas]


def test_reasoning_ends_at_its_mark(dialect: Dialect) -> None:
    assert pieces(told(dialect, f"why\n</think>\n\nbecause{given.EOS}", THINKING)) == [
        ("reasoning", "", "why\n"),
        ("content", "", "\n\nbecause"),
    ]


def test_without_open_reasoning_marks_are_text(dialect: Dialect) -> None:
    assert pieces(told(dialect, "<think>a</think>b", PLAIN)) == [("content", "", "<think>a</think>b")]


def test_a_mark_spelled_in_letters_is_text(dialect: Dialect) -> None:
    letters = [token for char in "</think>" for token in given.encode(char)]
    parser = dialect.chat_parser(THINKING, "r")
    assert pieces(coalesce(parser.push([*letters, *given.encode("on")]))) == [("reasoning", "", "</think>on")]


def test_both_published_forms_of_calls_are_read(dialect: Dialect) -> None:
    deltas = told(dialect, f"so</think>on\n{BEGIN}{V3_CALL}\n{V31_CALL}{END}{given.EOS}", THINKING)
    assert pieces(deltas) == [
        ("reasoning", "", "so"),
        ("content", "", "on\n"),
        ("tool_call", "add", '{"a": "<é>"}'),
        ("tool_call", "sub", '{"b": 2}'),
    ]
    assert [delta.call_index for delta in deltas[2:]] == [0, 1]
    assert deltas[2].call_id.startswith("call_00_") and deltas[3].call_id.startswith("call_01_")


def test_calls_may_come_out_of_reasoning_and_without_an_end(dialect: Dialect) -> None:
    parser = dialect.chat_parser(THINKING, "r")
    deltas = parser.push(given.encode(f"xyz{BEGIN}{V31_CALL}"))
    ending = parser.finish()
    assert pieces(coalesce([*deltas, *ending.deltas])) == [("reasoning", "", "xyz"), ("tool_call", "sub", '{"b": 2}')]
    assert (ending.called_tools, ending.reasoning_tokens) == (True, 3)


@pytest.mark.parametrize(
    "markup",
    [
        f"{BEGIN}{END}",
        f"{BEGIN}{OPEN}add{CLOSE}{END}",
        f"{BEGIN}{OPEN}add{SEP}not json{CLOSE}{END}",
        f"{BEGIN}{OPEN}add{SEP}[1]{CLOSE}{END}",
        f'{BEGIN}{OPEN}a b{SEP}{{"a": 1}}{CLOSE}{END}',
        f"{BEGIN}{OPEN}add{SEP}{{}}{SEP}{{}}{CLOSE}{END}",
        f"{BEGIN}{OPEN}function{SEP}add\n```json\n{{\n```{CLOSE}{END}",
        f"{BEGIN}words{V31_CALL}{END}",
        f"{BEGIN}{BEGIN}{V31_CALL}{END}",
        f"{BEGIN}{OPEN}add{SEP}5{CLOSE}{V31_CALL}{END}",
        f"{BEGIN}{CLOSE}{SEP}{END}on",
        f"{BEGIN}{OPEN}add{SEP}{{",
        f"{OPEN}add{SEP}{{}}{CLOSE}",
        f"{END}on",
    ],
)
def test_markup_that_is_no_call_is_text_as_it_was_spelled(dialect: Dialect, markup: str) -> None:
    assert pieces(told(dialect, markup, PLAIN)) == [("content", "", markup)]


def test_a_call_that_was_read_stays_one_whatever_follows(dialect: Dialect) -> None:
    deltas = told(dialect, f"{BEGIN}{V31_CALL}{OPEN}junk{CLOSE}{END}", PLAIN)
    assert pieces(deltas) == [("tool_call", "sub", '{"b": 2}'), ("content", "", f"{OPEN}junk{CLOSE}{END}")]


def test_markup_in_letters_inside_arguments_is_part_of_them(dialect: Dialect) -> None:
    letters = [token for char in f"{OPEN}{END}" for token in given.tokenizer().encode(char).ids]
    ids = [*given.encode(f'{BEGIN}{OPEN}add{SEP}{{"a": "'), *letters, *given.encode(f'"}}{CLOSE}{END}')]
    parser = dialect.chat_parser(PLAIN, "r")
    assert pieces(coalesce([*parser.push(ids), *parser.finish().deltas])) == [
        ("tool_call", "add", f'{{"a": "{OPEN}{END}"}}')
    ]


def test_without_tools_markup_is_text(dialect: Dialect) -> None:
    text = f"{BEGIN}{V31_CALL}{END}"
    assert pieces(told(dialect, text, ParsingOptions())) == [("content", "", text)]


def test_half_a_character_before_a_mark_is_dropped(dialect: Dialect) -> None:
    ids = [*given.encode("aé")[:-1], *given.encode("</think>b")]
    deltas = dialect.chat_parser(THINKING, "r").push(ids)
    assert pieces(coalesce(deltas)) == [("reasoning", "", "a"), ("content", "", "b")]


def test_logprobs_travel_with_their_text_in_openais_form(dialect: Dialect) -> None:
    ids = given.encode("é</think>the")
    entries = [(-float(index), [(ids[0], -0.5)]) for index in range(len(ids))]
    reasoning, content = dialect.chat_parser(THINKING, "r").push(ids, entries)
    assert [entry["token"] for entry in reasoning.logprobs] == ["\\xc3", "\\xa9"]
    assert content.logprobs == (
        {
            "token": "the",
            "logprob": -3.0,
            "bytes": [116, 104, 101],
            "top_logprobs": [{"token": "\\xc3", "logprob": -0.5, "bytes": [0xC3]}],
        },
    )
    with pytest.raises(InvalidArgument):
        dialect.chat_parser(THINKING, "r").push(ids, entries[1:])


def test_a_whole_body_has_openais_calls_and_usage(dialect: Dialect) -> None:
    chat = ChatSession(
        dialect.chat_parser(THINKING, "r"), StopTrim((), dialect.silent), BodyWriter(Heading("r", "m", 1, True))
    )
    chat.push(given.encode(f"why</think>{BEGIN}{V3_CALL}{END}"))
    end = chat.finish("stop", "", TokenUsage(1, 0, 9, 0))
    choice_: dict[str, Any] = json.loads(end.step.wire[-1])["choices"][0]
    assert (end.reason, choice_["finish_reason"], end.reasoning_tokens) == ("tool_calls", "tool_calls", 3)
    assert choice_["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": "<é>"}'}
    assert choice_["message"]["reasoning_content"] == "why"


@pytest.mark.parametrize("stop", ["</think>th", "y</think>", f"e{given.EOS}"])
def test_a_stop_string_with_control_tokens_is_trimmed(dialect: Dialect, stop: str) -> None:
    text = "why</think>the" + given.EOS
    spoken = text[: text.index(stop) + len(stop)]
    parser, trim = dialect.chat_parser(THINKING, "r"), StopTrim((stop,), dialect.silent)
    deltas = [delta for token in given.encode(spoken) for delta in trim.push(parser.push([token]))]
    deltas += trim.finish(parser.finish().deltas, stop)
    said = "".join(delta.text for delta in deltas if delta.kind is not Kind.TOOL_CALL)
    assert said == text[: text.index(stop)].replace("</think>", "")
