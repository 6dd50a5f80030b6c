"""The recipe's dialects as its callers see them: told by Info, refused by name, the same over gRPC."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest_asyncio

from fabric.channels import Channels, call, stream
from fabric.errors import InvalidArgument, ServiceError
from fabric.server import Chassis
from protos.deepinfer.v1 import common_pb2, recipe_pb2, recipe_pb2_grpc
from services.recipe.service import build
from services.recipe.settings import RecipeSettings
from tests.support import templatemodel

CHAT, TEXT = recipe_pb2.DIALECT_OPENAI_CHAT, recipe_pb2.DIALECT_TEXT
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi <think>"}]}).encode()

Serve = Callable[[str | None], Awaitable[Any]]


@pytest_asyncio.fixture(loop_scope="session")
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """Starts a recipe over a folder with that template; gives its stub."""
    async with AsyncExitStack() as stack:
        channels = await stack.enter_async_context(Channels())

        async def start(template: str | None) -> Any:
            folder = templatemodel.write(tmp_path / "m", template)
            chassis = Chassis(RecipeSettings(discovery=f"memory://{uuid4().hex}", model=folder), build)
            stack.push_async_callback(chassis.close)
            return channels.stub(recipe_pb2_grpc.RecipeServiceStub, (await chassis.start()).address)

        yield start


async def refusal(stub: Any, request: recipe_pb2.RenderRequest) -> ServiceError | None:
    try:
        await call(stub.Render, request)
    except ServiceError as error:
        return error
    return None


async def test_a_model_with_a_template_chats_and_says_so(serve: Serve) -> None:
    stub = await serve(templatemodel.R1)
    info = await call(stub.Info, recipe_pb2.RecipeServiceInfoRequest())
    assert (info.encoding, list(info.dialects)) == ("template", [TEXT, CHAT])
    rendered = await call(stub.Render, recipe_pb2.RenderRequest(dialect=CHAT, body=BODY))
    assert templatemodel.spelled(list(rendered.token_ids)).endswith("hi <think><｜Assistant｜><think>\n")
    assert rendered.thinking

    async def answer() -> AsyncIterator[recipe_pb2.ParseRequest]:
        begin = recipe_pb2.ParseStart(dialect=CHAT, request_id="r", parsing_options=rendered.parsing_options)
        yield recipe_pb2.ParseRequest(start=begin)
        for text in ("why", "</think>", "so"):
            yield recipe_pb2.ParseRequest(tokens=recipe_pb2.ParseTokens(token_ids=templatemodel.encode(text)))
        yield recipe_pb2.ParseRequest(finish=recipe_pb2.ParseFinish(reason=common_pb2.FINISH_REASON_STOP))

    events = [event async for reply in stream(stub.Parse, answer()) for event in reply.events]
    said = ("".join(event.reasoning for event in events), "".join(event.content for event in events))
    assert said == ("why", "so")


async def test_a_model_without_a_chat_form_generates_and_refuses_chats_by_file(serve: Serve) -> None:
    stub = await serve(None)
    info = await call(stub.Info, recipe_pb2.RecipeServiceInfoRequest())
    assert (info.encoding, list(info.dialects)) == ("plain", [TEXT])
    rendered = await call(stub.Render, recipe_pb2.RenderRequest(dialect=TEXT, text="hi"))
    assert templatemodel.spelled(list(rendered.token_ids)) == templatemodel.BOS + "hi"
    error = await refusal(stub, recipe_pb2.RenderRequest(dialect=CHAT, body=BODY))
    assert isinstance(error, InvalidArgument) and "chat_template" in error.message and error.fix
