"""The recipe as its callers see it: any instance parses what any other rendered."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

from fabric.channels import Channels, call, stream
from fabric.errors import InvalidArgument, NotFound, ServiceError, StartError
from fabric.server import Chassis
from protos.deepinfer.v1 import common_pb2, recipe_pb2, recipe_pb2_grpc
from services.recipe.service import build
from services.recipe.settings import RecipeSettings
from tests.support import bytemodel

CHAT = recipe_pb2.DIALECT_OPENAI_CHAT


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stubs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Any, Any]]:
    """Two instances of one recipe."""
    folder = bytemodel.write(tmp_path_factory.mktemp("model") / "bytes")
    async with AsyncExitStack() as stack:
        channels = await stack.enter_async_context(Channels())
        made = []
        for _ in range(2):
            chassis = Chassis(RecipeSettings(discovery=f"memory://{uuid4().hex}", model=folder), build)
            stack.push_async_callback(chassis.close)
            made.append(channels.stub(recipe_pb2_grpc.RecipeServiceStub, (await chassis.start()).address))
        yield made[0], made[1]


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "bytes", "messages": [{"role": "user", "content": "hi"}]} | fields).encode()


async def parse(stub: Any, *messages: recipe_pb2.ParseRequest) -> list[recipe_pb2.ParseEvent]:
    async def outgoing() -> AsyncIterator[recipe_pb2.ParseRequest]:
        for message in messages:
            yield message

    return [event async for reply in stream(stub.Parse, outgoing()) for event in reply.events]


def tokens(text: str) -> recipe_pb2.ParseRequest:
    return recipe_pb2.ParseRequest(tokens=recipe_pb2.ParseTokens(token_ids=bytemodel.encode(text)))


FINISH = recipe_pb2.ParseRequest(finish=recipe_pb2.ParseFinish(reason=common_pb2.FINISH_REASON_STOP))


def start(**fields: Any) -> recipe_pb2.ParseRequest:
    return recipe_pb2.ParseRequest(start=recipe_pb2.ParseStart(**({"dialect": CHAT, "request_id": "r"} | fields)))


async def test_one_instance_parses_what_the_other_rendered(stubs: tuple[Any, Any]) -> None:
    rendered = await call(stubs[0].Render, recipe_pb2.RenderRequest(dialect=CHAT, body=body()))
    assert rendered.thinking and rendered.default_max_tokens
    begin = start(parsing_options=rendered.parsing_options, stream=True)
    events = await parse(stubs[1], begin, tokens("why</th"), tokens("ink></think>so"), FINISH)
    assert (
        "".join(event.reasoning for event in events) == "why</think>"
    )  # spelled in pieces it is text, no control token
    assert "".join(event.content for event in events) == "so"
    assert events[-1].done.reason == common_pb2.FINISH_REASON_STOP
    chunks = [json.loads(event.wire) for event in events if event.wire]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_plain_text_has_neutral_events_only(stubs: tuple[Any, Any]) -> None:
    request = recipe_pb2.RenderRequest(dialect=recipe_pb2.DIALECT_TEXT, text="<think>")
    rendered = await call(stubs[0].Render, request)
    assert len(rendered.token_ids) == len("<think>")
    begin = start(dialect=recipe_pb2.DIALECT_TEXT, stop=["b"])
    finish = recipe_pb2.ParseFinish(reason=common_pb2.FINISH_REASON_STOP, stop="b")
    events = await parse(stubs[1], begin, tokens("ab"), recipe_pb2.ParseRequest(finish=finish))
    assert [event.content for event in events[:-1]] == ["a"] and not any(event.wire for event in events)


async def test_info_tells_its_limits(stubs: tuple[Any, Any]) -> None:
    info = await call(stubs[0].Info, recipe_pb2.RecipeServiceInfoRequest())
    assert (info.model, info.encoding, info.max_request_bytes) == ("bytes", "v4.1", 4 << 20)
    assert list(info.dialects) == [recipe_pb2.DIALECT_TEXT, CHAT]


@pytest.mark.parametrize(
    ("request_", "kind", "field"),
    [
        (recipe_pb2.RenderRequest(body=body()), InvalidArgument, "dialect"),
        (recipe_pb2.RenderRequest(dialect=recipe_pb2.DIALECT_ANTHROPIC_MESSAGES), InvalidArgument, "dialect"),
        (recipe_pb2.RenderRequest(dialect=CHAT, body=b" " * ((4 << 20) + 1)), InvalidArgument, "body"),
        (recipe_pb2.RenderRequest(dialect=CHAT, body=body(messages=[])), InvalidArgument, "messages"),
        (recipe_pb2.RenderRequest(dialect=CHAT, body=body(model="x")), NotFound, "model"),
        (recipe_pb2.RenderRequest(dialect=recipe_pb2.DIALECT_TEXT), InvalidArgument, "text"),
    ],
)
async def test_a_bad_render_names_its_field(
    stubs: tuple[Any, Any], request_: recipe_pb2.RenderRequest, kind: type[ServiceError], field: str
) -> None:
    with pytest.raises(kind) as caught:
        await call(stubs[0].Render, request_)
    assert caught.value.field == field and caught.value.fix


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([tokens("a")], "start"),
        ([], "start"),
        ([start(), start()], "message"),
        ([start(parsing_options=b"junk")], "parsing_options"),
        ([start(dialect=recipe_pb2.DIALECT_UNSPECIFIED)], "dialect"),
        ([start(stop=["x"] * 65)], "start.stop"),
        ([start(), tokens("a" * 4097)], "tokens.token_ids"),
    ],
)
async def test_a_bad_parse_names_its_field(
    stubs: tuple[Any, Any], messages: list[recipe_pb2.ParseRequest], field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await parse(stubs[0], *messages)
    assert caught.value.field == field


async def test_a_folder_without_a_tokenizer_stops_the_start(tmp_path: Path) -> None:
    chassis = Chassis(RecipeSettings(discovery=f"memory://{uuid4().hex}", model=tmp_path), build)
    with pytest.raises(StartError) as caught:
        await chassis.start()
    assert "tokenizer.json" in caught.value.message and caught.value.field == "model" and caught.value.fix
