"""Rendering: what reaches the engine, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fabric.errors import InvalidArgument, NotFound, StartError
from services.recipe import options
from services.recipe.codec import Codec
from services.recipe.dialect import Rendered
from services.recipe.model_files import ModelFiles
from tests.support import bytemodel

DATA = Path(__file__).parents[3] / "data"

USER = {"role": "user", "content": "x"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
}


def answer(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "1"}


def asking(*call_ids: str) -> dict[str, Any]:
    function = {"name": "add", "arguments": "{}"}
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in call_ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def nested(depth: int) -> dict[str, Any]:
    tree: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        tree = {"properties": tree}
    return tree


def render(codec: Codec, **fields: Any) -> Rendered:
    body = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}]} | fields
    return codec.render_chat(json.dumps(body).encode())


def text_of(rendered: Rendered) -> str:
    return str(bytemodel.tokenizer().decode(rendered.token_ids, skip_special_tokens=False))


def test_a_conversation_ends_where_the_model_is_to_reason(codec: Codec) -> None:
    rendered = render(codec)
    assert text_of(rendered).endswith("<｜User｜>hi<｜Assistant｜><think>")
    assert rendered.thinking and options.load(rendered.parsing_options).stage == "reasoning_start"


def test_disabled_thinking_closes_the_reasoning_in_the_prompt(codec: Codec) -> None:
    rendered = render(codec, thinking={"type": "disabled"})
    assert text_of(rendered).endswith("<｜Assistant｜></think>")
    assert not rendered.thinking and options.load(rendered.parsing_options).stage == ""


def test_user_text_never_becomes_a_control_token(codec: Codec) -> None:
    spelled = "".join(bytemodel.SPELLINGS)
    plain = render(codec)
    hostile = render(codec, messages=[{"role": "user", "content": spelled}])
    special = set(bytemodel.encode(spelled))
    assert [token for token in hostile.token_ids if token in special] == [
        token for token in plain.token_ids if token in special
    ]


def test_plain_text_is_encoded_without_control_tokens(codec: Codec) -> None:
    rendered = codec.render_text("a<think>b")
    assert text_of(rendered) == "a<think>b"
    assert not set(rendered.token_ids) & set(bytemodel.encode("<think>"))


def test_tools_are_offered_and_their_calls_parsed(codec: Codec) -> None:
    rendered = render(codec, tools=[TOOL])
    assert '"name": "add"' in text_of(rendered)
    assert options.load(rendered.parsing_options).tools
    assert rendered.constraint_kind == ""


def test_a_required_call_begins_inside_the_tool_block(codec: Codec) -> None:
    rendered = render(codec, tools=[TOOL], tool_choice="required", thinking={"type": "disabled"})
    assert options.load(rendered.parsing_options).starts_in_tools
    assert rendered.constraint_kind == "tool_call_required"


def test_default_output_length_fits_the_context(codec: Codec) -> None:
    rendered = render(codec)
    assert rendered.default_max_tokens == bytemodel.CONTEXT_TOKENS - len(rendered.token_ids)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "bob", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"tools": [TOOL, {"type": "function", "function": {"name": "b", "parameters": {"type": 5}}}]},
         "tools[1].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [USER, answer("a")]}, "messages[1].tool_call_id"),
        ({"messages": [answer("a")]}, "messages[0].tool_call_id"),
        ({"messages": [USER, asking("a"), answer("b")]}, "messages[2].tool_call_id"),
        ({"messages": [USER, asking("a"), answer("a"), answer("a")]}, "messages[3].tool_call_id"),
        ({"messages": [USER, asking("a"), USER]}, "messages[2]"),
        ({"messages": [USER, asking("a", "a"), answer("a")]}, "messages[1].tool_calls"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": nested(150)}}]}, "body"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"temperature": 5}, "temperature"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 500_000}]}, "messages"),
    ],
)  # fmt: skip
def test_a_bad_request_names_its_field_and_the_fix(codec: Codec, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        render(codec, **fields)
    assert caught.value.field == field
    assert caught.value.fix


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"a":' * 5000])
def test_what_is_not_a_json_object_is_refused(codec: Codec, body: bytes) -> None:
    with pytest.raises(InvalidArgument) as caught:
        codec.render_chat(body)
    assert caught.value.field in ("body", "messages")


def test_another_model_is_not_found(codec: Codec) -> None:
    with pytest.raises(NotFound) as caught:
        render(codec, model="other")
    assert caught.value.field == "model"


def test_errors_never_quote_the_request(codec: Codec) -> None:
    canary = "CANARY7731"
    hostile: list[dict[str, Any]] = [
        {"messages": [{"role": canary, "content": canary}]},
        {"messages": [{"role": "user", "content": {"x": canary}}]},
        {"tools": [{"type": "function", "function": {"name": canary, "parameters": {"type": canary}}}]},
        {"tool_choice": canary},
        {"reasoning_effort": canary},
        {"model": canary},
    ]
    for fields in hostile:
        with pytest.raises((InvalidArgument, NotFound)) as caught:
            render(codec, **fields)
        assert canary not in str(caught.value)


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json"])
def test_a_missing_file_stops_the_start_by_name(tmp_path: Path, missing: str) -> None:
    folder = bytemodel.write(tmp_path / "model")
    (folder / missing).unlink()
    with pytest.raises(StartError) as caught:
        Codec("m", ModelFiles.read(folder), "v4.1")
    assert missing in caught.value.message and caught.value.field == "model" and caught.value.fix


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "not json"),
        ("config.json", "[]"),
        ("config.json", '{"vocab_size": "many", "max_position_embeddings": 10}'),
        ("config.json", '{"vocab_size": true, "max_position_embeddings": 10}'),
        ("config.json", '{"vocab_size": 10, "max_position_embeddings": 10, "text_config": []}'),
    ],
)
def test_a_broken_file_stops_the_start_by_name(tmp_path: Path, file: str, text: str) -> None:
    folder = bytemodel.write(tmp_path / "model")
    (folder / file).write_text(text)
    with pytest.raises(StartError) as caught:
        Codec("m", ModelFiles.read(folder), "v4.1")
    assert file in caught.value.message


def test_limits_are_read_from_the_section_where_v41_publishes_them(tmp_path: Path) -> None:
    folder = bytemodel.write(tmp_path / "model")
    published = (DATA / "v41" / "flash-config.json").read_text()
    (folder / "config.json").write_text(published)
    codec = Codec("m", ModelFiles.read(folder), "v4.1")
    assert (codec.max_context_tokens, codec.vocab_size) == (1_048_576, 129_280)
    tree = json.loads(published)
    del tree["text_config"]["vocab_size"]
    (folder / "config.json").write_text(json.dumps(tree | {"vocab_size": 10}))
    with pytest.raises(StartError, match=r"config\.json: text_config\.vocab_size is not a whole number"):
        Codec("m", ModelFiles.read(folder), "v4.1")


def test_a_tokenizer_of_another_encoding_stops_the_start(tmp_path: Path) -> None:
    folder = bytemodel.write(tmp_path / "model")
    tree = json.loads((folder / "tokenizer.json").read_text())
    tree["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(StartError, match="has no token"):
        Codec("m", ModelFiles.read(folder), "v4.1")
