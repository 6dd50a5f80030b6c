"""However the answer of a model with a chat template is cut into batches, its client reads the same (promise 41)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.recipe import choice
from services.recipe.chat_wire import ChunkWriter, Heading, TokenUsage
from services.recipe.deltas import Delta, Kind, coalesce
from services.recipe.dialect import Dialect
from services.recipe.options import ParsingOptions
from services.recipe.parse import ChatSession
from services.recipe.settings import RecipeSettings
from services.recipe.trim import StopTrim
from tests.support import templatemodel

CALL = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "é"}\n```<｜tool▁call▁end｜>'
FRAGMENTS = [
    "plain ", "the", "é", "\U0001f600", "</thi", "nk>", "STOP", "ST", "\n", '{"a": 1}', "function", "name",
    *templatemodel.SPELLINGS, CALL, f"<｜tool▁calls▁begin｜>{CALL}{CALL}<｜tool▁calls▁end｜>",
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
parsings = st.builds(ParsingOptions, stage=st.sampled_from(["", "reasoning_start"]), tools=st.booleans())
stop_lists = st.sampled_from([(), ("STOP",), ("é", "STOP", "\n"), ("</think>the",)])


@pytest.fixture(scope="module")
def dialect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dialect]:
    folder = templatemodel.write(tmp_path_factory.mktemp("model") / "m", templatemodel.R1)
    opened = choice.open_dialect(RecipeSettings(discovery="memory://x", model=folder))
    with ExitStack() as held:
        for process in opened.processes:
            held.callback(process.close)
        yield opened


def told(dialect: Dialect, tokens: list[int], cuts: list[int], parsing: ParsingOptions, stops: tuple[str, ...]) -> Any:
    """Neutral events, coalesced, and the end, of `tokens` cut at `cuts`."""
    writer = ChunkWriter(Heading("r", "m", 1, parsing.thinking), include_usage=False)
    chat = ChatSession(dialect.chat_parser(parsing, "r"), StopTrim(stops, dialect.silent), writer)
    deltas: list[Delta] = []
    for start, stop in pairwise([0, *sorted(cuts), len(tokens)]):
        deltas += chat.push(tokens[start:stop]).deltas
    end = chat.finish("stop", "", TokenUsage(1, 0, 1, 0))
    return coalesce([*deltas, *end.step.deltas]), end.reason, end.reasoning_tokens


@given(text=texts, parsing=parsings, stops=stop_lists, data=st.data())
def test_events_do_not_depend_on_where_the_output_is_cut(
    dialect: Dialect, text: str, parsing: ParsingOptions, stops: tuple[str, ...], data: st.DataObject
) -> None:
    tokens = templatemodel.encode(text)
    whole = told(dialect, tokens, [], parsing, stops)
    every = list(range(1, len(tokens)))
    assert told(dialect, tokens, every, parsing, stops) == whole
    some = data.draw(st.lists(st.sampled_from(every), unique=True)) if every else []
    assert told(dialect, tokens, some, parsing, stops) == whole


@given(text=texts, parsing=parsings)
def test_nothing_that_the_model_said_is_lost_but_marks(dialect: Dialect, text: str, parsing: ParsingOptions) -> None:
    deltas, _, _ = told(dialect, templatemodel.encode(text), [], parsing, ())
    said = "".join(delta.text for delta in deltas if delta.kind is not Kind.TOOL_CALL)
    called = sum(delta.kind is Kind.TOOL_CALL for delta in deltas)
    bare = text
    for mark in dialect.silent:
        bare, said = bare.replace(mark, ""), said.replace(mark, "")
    body = 'functionf\n```json\n{"a": "é"}\n```'
    assert bare.count(body) == said.count(body) + called or not called
    if not called:
        assert said == bare
