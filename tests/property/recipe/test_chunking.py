"""However an answer is cut into batches, its client reads the same (promise 41)."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import deepseek_recipe as recipe
from hypothesis import given
from hypothesis import strategies as st

from services.recipe.chat_wire import ChunkWriter, Heading, TokenUsage
from services.recipe.codec import Codec
from services.recipe.deltas import Delta, coalesce
from services.recipe.model_files import ModelFiles
from services.recipe.options import ParsingOptions
from services.recipe.parse import ChatSession
from services.recipe.trim import StopTrim
from tests.support import bytemodel

USAGE = TokenUsage(1, 0, 1, 0)
OPEN, CLOSE = '<｜DSML｜ invoke name="f">\n', "</｜DSML｜ invoke>\n"
FRAGMENTS = [
    "plain ", "é", "😀", "</think>", "<think>", "</thi", "nk>", "STOP", "ST", "\n\n", '"', "\\", "{", "}",
    "<｜DSML｜ calls>\n", "</｜DSML｜ calls>", OPEN, CLOSE,
    "<｜DSML｜ parameter name=\"a\" string=\"true\">", "<｜DSML｜ parameter name=\"b\" string=\"false\">",
    "</｜DSML｜ parameter>\n", "<｜DSML｜", "<｜User｜>", "12", "<｜end▁of▁sentence｜>",
]  # fmt: skip
GOOD_CALL = (
    f'<｜DSML｜ calls>\n{OPEN}<｜DSML｜ parameter name="a" string="true">é"x</｜DSML｜ parameter>\n'
    f"{CLOSE}{OPEN}{CLOSE}</｜DSML｜ calls>"
)
texts = st.lists(st.sampled_from([*FRAGMENTS, GOOD_CALL]), max_size=12).map("".join)
parsings = st.builds(
    ParsingOptions,
    stage=st.sampled_from(["", "reasoning_start", "reasoning_continuation", "content_continuation"]),
    tools=st.booleans(),
)


@cache
def codec() -> Codec:
    return Codec("bytes", ModelFiles.read(bytemodel.write(Path(mkdtemp()) / "bytes")), "v4.1")


def told(tokens: list[int], cuts: list[int], parsing: ParsingOptions, stops: tuple[str, ...]) -> Any:
    """Neutral events, coalesced, and the end, of `tokens` cut at `cuts`."""
    writer = ChunkWriter(Heading("r", "bytes", 1, parsing.thinking), include_usage=False)
    chat = ChatSession(codec().chat_parser(parsing, "r"), StopTrim(stops), writer)
    deltas: list[Delta] = []
    for start, stop in pairwise([0, *sorted(cuts), len(tokens)]):
        deltas += chat.push(tokens[start:stop]).deltas
    end = chat.finish("stop", "", USAGE)
    return coalesce([*deltas, *end.step.deltas]), end.reason, end.reasoning_tokens


@given(texts, parsings, st.sampled_from([(), ("STOP",), ("é", "STOP", "\n")]), st.data())
def test_events_do_not_depend_on_where_the_output_is_cut(
    text: str, parsing: ParsingOptions, stops: tuple[str, ...], data: st.DataObject
) -> None:
    tokens = bytemodel.encode(text)
    whole = told(tokens, [], parsing, stops)
    every = list(range(1, len(tokens)))
    assert told(tokens, every, parsing, stops) == whole
    some = data.draw(st.lists(st.sampled_from(every), unique=True)) if every else []
    assert told(tokens, some, parsing, stops) == whole


@given(texts, parsings)
def test_events_agree_with_deepseek_recipe_itself(text: str, parsing: ParsingOptions) -> None:
    tokens = [token for token in bytemodel.encode(text) if token != bytemodel.EOS]
    deltas, reason, _ = told(tokens, [], parsing, ())
    assert (_flat(deltas), reason) == _reference(tokens, parsing)


@given(texts, st.integers(0, 40))
def test_nothing_after_the_stop_string_that_ended_the_answer_is_told(text: str, cut: int) -> None:
    prefix = text.replace("STOP", "")[:cut]
    tokens = bytemodel.encode(prefix + "@@")
    writer = ChunkWriter(Heading("r", "bytes", 1, False), include_usage=False)
    chat = ChatSession(codec().chat_parser(ParsingOptions(), "r"), StopTrim(["@@"]), writer)
    deltas = [delta for token in tokens for delta in chat.push([token]).deltas]
    deltas += chat.finish("stop", "@@", USAGE).step.deltas
    assert "@" not in "".join(delta.text for delta in deltas)


def _flat(deltas: list[Delta]) -> list[tuple[str, int, str, str]]:
    return [(delta.kind.value, delta.call_index, delta.name, delta.text) for delta in deltas]


def _reference(tokens: list[int], parsing: ParsingOptions) -> tuple[list[tuple[str, int, str, str]], str]:
    """What the library says of the same tokens, read from its own chunks."""
    stages = {
        "reasoning_start": recipe.ThinkingInitialStage.ReasoningStart,
        "reasoning_continuation": recipe.ThinkingInitialStage.ReasoningContinuation,
        "content_continuation": recipe.ThinkingInitialStage.ContentContinuation,
    }
    shape = recipe.ConversationRequest(
        recipe.Conversation(thinking_mode=parsing.thinking), recipe.ModelVersion.DeepseekV41Flash
    )
    processor = recipe.StreamProcessor(
        recipe.ChatCompletionRequest.chunk_generator(shape, "r", "m"),
        recipe.ParsingOptions(parse_tool_calls=parsing.tools, thinking_initial_stage=stages.get(parsing.stage)),
        recipe.Tokenizer.from_str(bytemodel.tokenizer().to_str()),
    )
    chunks = [processor.push(recipe.InferenceChunk.tokens(tokens))] if tokens else []
    chunks.append(processor.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop)))
    choices = [json.loads(chunk.to_json())["choices"][0] for batch in chunks for chunk in batch]
    flat: list[tuple[str, int, str, str]] = []
    for delta in (choice["delta"] for choice in choices):
        for kind, name in (("reasoning", "reasoning_content"), ("content", "content")):
            if delta.get(name):
                _join(flat, (kind, 0, "", delta[name]))
        for call in delta.get("tool_calls", []):
            _join(flat, ("tool_call", call["index"], call["function"].get("name", ""), call["function"]["arguments"]))
    return flat, choices[-1]["finish_reason"]


def _join(flat: list[tuple[str, int, str, str]], piece: tuple[str, int, str, str]) -> None:
    if flat and flat[-1][:2] == piece[:2] and not piece[2]:
        flat[-1] = (*flat[-1][:3], flat[-1][3] + piece[3])
    else:
        flat.append(piece)
