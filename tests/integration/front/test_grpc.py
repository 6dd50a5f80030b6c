"""The gRPC surface: chat, generate, models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from fabric import errors
from fabric.channels import Channels, call, stream
from protos.deepinfer.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.support import bytemodel, fakeworkers
from tests.support.frontstack import FrontStack


@pytest_asyncio.fixture(loop_scope="session")
async def stub(stack: FrontStack) -> AsyncIterator[Any]:
    async with Channels() as channels:
        yield channels.stub(gateway_pb2_grpc.GatewayServiceStub, stack.grpc)


def chat(text: str = "hi", **fields: Any) -> gateway_pb2.ChatRequest:
    message = gateway_pb2.ChatMessage(role="user", content=text)
    return gateway_pb2.ChatRequest(model=fakeworkers.MODEL, messages=[message], **fields)


def generate(model: str = fakeworkers.MODEL, **fields: Any) -> gateway_pb2.GatewayServiceGenerateRequest:
    return gateway_pb2.GatewayServiceGenerateRequest(model=model, **fields)


async def test_a_chat_streams_reasoning_then_content(stack: FrontStack, stub: Any) -> None:
    tokens = [*bytemodel.encode("why</think>because"), bytemodel.EOS]
    stack.script.answer = lambda prompt: tokens
    replies = [reply async for reply in stream(stub.Chat, chat())]
    assert "".join(reply.reasoning for reply in replies) == "why"
    assert "".join(reply.content for reply in replies) == "because"
    usage = replies[-1].finish.usage
    assert (usage.completion_tokens, usage.reasoning_tokens) == (len(tokens), 3)
    assert replies[-1].finish.reason == common_pb2.FINISH_REASON_STOP


async def test_tools_come_as_parts(stack: FrontStack, stub: Any) -> None:
    call_text = '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
    tokens = [*bytemodel.encode(f"</think>{call_text}"), bytemodel.EOS]
    stack.script.answer = lambda prompt: tokens
    tool = gateway_pb2.Tool(name="f", description="d", parameters_json='{"type": "object"}')
    replies = [reply async for reply in stream(stub.Chat, chat(tools=[tool], tool_choice="auto"))]
    parts = [part for reply in replies for part in reply.tool_calls]
    assert parts[0].name == "f" and parts[0].id and "".join(part.arguments for part in parts) == "{}"
    assert replies[-1].finish.reason == common_pb2.FINISH_REASON_TOOL_CALLS


@pytest.mark.parametrize("as_ids", [True, False])
async def test_a_continuation_takes_text_or_tokens(stack: FrontStack, stub: Any, as_ids: bool) -> None:
    ids = bytemodel.encode("abc")
    tokens = [*bytemodel.encode("d</think>é"), bytemodel.EOS]
    stack.script.answer = lambda prompt: tokens
    prompt: dict[str, Any] = {"token_ids": gateway_pb2.TokenIds(ids=ids)} if as_ids else {"text": "abc"}
    sampling = common_pb2.SamplingParams(max_tokens=9, temperature=0, logprobs=1)
    replies = [reply async for reply in stream(stub.Generate, generate(sampling=sampling, **prompt))]
    assert [token for reply in replies for token in reply.token_ids] == tokens[:9]
    assert "".join(reply.text for reply in replies) == "d</think>é"
    assert sum(len(reply.logprobs) for reply in replies) == len(tokens)
    assert list(stack.prefills[0].worker.watched.requests[0].token_ids) == ids


async def test_models_tell_their_limits(stub: Any) -> None:
    reply = await call(stub.ListModels, gateway_pb2.ListModelsRequest())
    (served,) = reply.models
    assert served.model.name == fakeworkers.MODEL and served.max_output_tokens == bytemodel.CONTEXT_TOKENS - 1
    assert (served.prefill_workers, served.decode_workers) == (1, 1)


SAMPLING = common_pb2.SamplingParams


@pytest.mark.parametrize(
    ("request_", "kind", "field"),
    [
        (chat(sampling=SAMPLING(temperature=float("nan"))), errors.InvalidArgument, "sampling.temperature"),
        (chat(sampling=SAMPLING(max_tokens=2**31)), errors.InvalidArgument, "sampling.max_tokens"),
        (chat(sampling=SAMPLING(max_tokens=bytemodel.CONTEXT_TOKENS)), errors.InvalidArgument, "sampling.max_tokens"),
        (chat("x" * 5000), errors.InvalidArgument, "messages"),
        (gateway_pb2.ChatRequest(model=fakeworkers.MODEL), errors.InvalidArgument, "messages"),
        (gateway_pb2.ChatRequest(messages=chat().messages), errors.InvalidArgument, "model"),
        (gateway_pb2.ChatRequest(model="none", messages=chat().messages), errors.NotFound, "model"),
        (chat(tools=[gateway_pb2.Tool(name="f", parameters_json="[]")]), errors.InvalidArgument, "tools[0]"),
        (generate(), errors.InvalidArgument, "prompt"),
        (generate(text="x", model="none"), errors.NotFound, "model"),
        (generate(text="x" * 5000), errors.InvalidArgument, "text"),
        (generate(text="x", sampling=SAMPLING(top_p=float("inf"))), errors.InvalidArgument, "sampling.top_p"),
        (generate(token_ids=gateway_pb2.TokenIds(ids=[10**6])), errors.InvalidArgument, "token_ids"),
        (generate(token_ids=gateway_pb2.TokenIds(ids=[1] * 5000)), errors.InvalidArgument, "token_ids"),
    ],
)
async def test_bad_input_names_field_and_fix_and_touches_no_worker(
    stack: FrontStack, stub: Any, request_: Any, kind: type[errors.ServiceError], field: str
) -> None:
    method = stub.Chat if isinstance(request_, gateway_pb2.ChatRequest) else stub.Generate
    with pytest.raises(kind) as caught:
        _ = [reply async for reply in stream(method, request_)]
    assert caught.value.field.startswith(field) and caught.value.fix
    assert stack.prefills[0].worker.watched.requests == [] and stack.decodes[0].worker.reserves == []


async def test_a_client_that_cancels_frees_everything(stack: FrontStack, stub: Any) -> None:
    stack.script.gates["token:1"] = asyncio.Event()
    running = stub.Chat(chat())
    await running.read()
    running.cancel()
    await stack.until_idle(10.0)
    assert await running.code() is grpc.StatusCode.CANCELLED


async def test_a_reservation_names_the_prefill_that_will_write_and_the_decode_that_is_meant(
    stack: FrontStack, stub: Any
) -> None:
    stack.script.answer = lambda prompt: [*bytemodel.encode("x"), bytemodel.EOS]
    assert [reply async for reply in stream(stub.Chat, chat())]
    [reserve] = [request for served in stack.decodes for request in served.worker.reserves[-1:]][:1]
    assert (reserve.writer.instance, reserve.writer.epoch, reserve.epoch) == ("prefill-0", 7, 7)
