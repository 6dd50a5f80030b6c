"""A hint that a conversation will go on: the worker hears of the prompt that it would get, and nothing is generated."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from fabric import errors
from fabric.channels import Channels, call
from protos.deepinfer.v1 import gateway_pb2, gateway_pb2_grpc, prefill_pb2
from tests.support import bytemodel, fakeworkers
from tests.support.frontstack import FrontStack

Hint = prefill_pb2.PrefillServicePrefetchRequest


@pytest_asyncio.fixture(loop_scope="session")
async def stub(stack: FrontStack) -> AsyncIterator[Any]:
    async with Channels() as channels:
        yield channels.stub(gateway_pb2_grpc.GatewayServiceStub, stack.grpc)


async def test_the_worker_is_told_the_prompt_that_the_turn_will_send(stack: FrontStack) -> None:
    reply = await stack.client.post("/v1/prefetch", json=stack.body("hello"))
    await stack.chat("hello")
    hint, start = stack.prefills[0].worker.watched.requests
    assert isinstance(hint, Hint) and not isinstance(start, Hint)
    assert (list(hint.token_ids), hint.salt, hint.scope) == (list(start.token_ids), start.salt, start.scope)
    said, tokens = reply.json(), len(hint.token_ids)
    assert said["object"] == "prefetch" and said["model"] == fakeworkers.MODEL and said["id"]
    assert (said["prompt_tokens"], said["held_tokens"], said["rising_tokens"]) == (
        tokens,
        tokens - 1,
        (tokens - 1) // 2,
    )


async def test_nothing_is_reserved_and_nothing_generated(stack: FrontStack) -> None:
    assert (await stack.client.post("/v1/prefetch", json=stack.body())).status_code == 200
    assert not stack.decodes[0].worker.reserves and stack.idle()
    metrics = (await stack.client.get("/metrics")).text
    assert 'deepinfer_gateway_requests_total{code="ok",surface="http_prefetch"}' in metrics


async def test_a_hint_for_a_request_that_could_not_be_answered_is_refused_in_its_words(stack: FrontStack) -> None:
    hint = await stack.client.post("/v1/prefetch", json=stack.body(max_tokens=-1))
    turn = await stack.chat(max_tokens=-1)
    assert (hint.status_code, hint.json()) == (turn.status_code, turn.json())
    assert not stack.prefills[0].worker.watched.requests


async def test_a_worker_that_does_not_answer_fails_the_hint_alone(stack: FrontStack) -> None:
    stack.script.faults["prefetch"] = [errors.Unavailable("gone")]
    assert (await stack.client.post("/v1/prefetch", json=stack.body())).status_code == 503
    assert (await stack.chat()).status_code == 200


async def test_grpc_takes_either_request(stack: FrontStack, stub: Any) -> None:
    chat = gateway_pb2.ChatRequest(
        model=fakeworkers.MODEL, messages=[gateway_pb2.ChatMessage(role="user", content="hi")]
    )
    ids = gateway_pb2.TokenIds(ids=bytemodel.encode("abc"))
    generate = gateway_pb2.GatewayServiceGenerateRequest(model=fakeworkers.MODEL, token_ids=ids)
    for request in ({"chat": chat}, {"generate": generate}):
        reply = await call(stub.Prefetch, gateway_pb2.GatewayServicePrefetchRequest(**request))
        assert reply.held_tokens == reply.prompt_tokens - 1 > 0 and reply.request_id
    with pytest.raises(errors.InvalidArgument, match="no request"):
        await call(stub.Prefetch, gateway_pb2.GatewayServicePrefetchRequest())


async def test_a_prompt_that_is_kept_out_of_caches_is_hinted_to_nobody(stack: FrontStack, stub: Any) -> None:
    ids = gateway_pb2.TokenIds(ids=bytemodel.encode("abc"))
    generate = gateway_pb2.GatewayServiceGenerateRequest(model=fakeworkers.MODEL, token_ids=ids, use_cache=False)
    reply = await call(stub.Prefetch, gateway_pb2.GatewayServicePrefetchRequest(generate=generate))
    assert (reply.prompt_tokens, reply.held_tokens) == (3, 0)
    assert not stack.prefills[0].worker.watched.requests
