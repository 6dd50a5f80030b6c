"""The endpoint's client against answers as a gateway gives them."""

import io
import json

import httpx2
import pytest
from rich.console import Console

from cli.chat import print_answer
from cli.client import Delta, GatewayClient, Summary
from fabric.errors import DeadlineExceeded, ServiceError, Unavailable


def chunk(delta: dict, finish: str | None = None) -> dict:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 16},
}
ANSWER = [
    chunk({"role": "assistant"}),
    chunk({"reasoning_content": "Hm. "}),
    chunk({"content": "4"}),
    chunk({"content": "2"}),
    chunk({}, "stop"),
    {"choices": [], "usage": USAGE},
]


def streaming(chunks: list[dict], end: str = "data: [DONE]\n\n") -> httpx2.MockTransport:
    body = "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + end
    return httpx2.MockTransport(
        lambda request: httpx2.Response(200, content=body, headers={"content-type": "text/event-stream"})
    )


def client(transport: httpx2.AsyncBaseTransport, times: list[float] | None = None) -> GatewayClient:
    left = iter(times or [float(i) for i in range(100)])
    return GatewayClient("http://gateway", transport=transport, clock=lambda: next(left))


async def test_an_answer_comes_in_pieces_with_its_figures_at_the_end():
    async with client(streaming(ANSWER), times=[10.0, 10.5, 12.5]) as gateway:
        pieces = [piece async for piece in gateway.chat({})]
    assert [p.reasoning + p.content for p in pieces if isinstance(p, Delta)] == ["", "Hm. ", "4", "2", ""]
    summary = pieces[-1]
    assert isinstance(summary, Summary)
    assert (summary.prompt_tokens, summary.completion_tokens, summary.cached_tokens) == (20, 5, 16)
    assert (summary.first_token_s, summary.tokens_per_s, summary.finish_reason) == (0.5, 2.0, "stop")


async def test_a_stream_that_breaks_off_is_an_error_not_an_answer():
    async with client(streaming(ANSWER[:3], end="")) as gateway:
        with pytest.raises(Unavailable, match="ended before"):
            [piece async for piece in gateway.chat({})]


async def test_a_refusal_keeps_the_gateways_words_and_field():
    error = {
        "error": {"message": "too many tokens", "type": "invalid_request_error", "param": "max_tokens", "code": None}
    }
    transport = httpx2.MockTransport(lambda request: httpx2.Response(400, json=error))
    async with client(transport) as gateway:
        with pytest.raises(ServiceError) as caught:
            [piece async for piece in gateway.chat({})]
    assert (caught.value.message, caught.value.field) == ("too many tokens", "max_tokens")


async def test_an_error_inside_the_stream_is_raised():
    error = {"error": {"message": "decode worker lost", "type": "unavailable", "param": None, "code": None}}
    async with client(streaming([*ANSWER[:3], error])) as gateway:
        with pytest.raises(ServiceError, match="decode worker lost"):
            [piece async for piece in gateway.chat({})]


@pytest.mark.parametrize(
    ("failure", "expected"),
    [(httpx2.ConnectError("refused"), Unavailable), (httpx2.ReadTimeout("slow"), DeadlineExceeded)],
)
async def test_a_gateway_out_of_reach_is_named_with_a_fix(failure, expected):
    def fail(request: httpx2.Request) -> httpx2.Response:
        raise failure

    async with client(httpx2.MockTransport(fail)) as gateway:
        with pytest.raises(expected, match="http://gateway") as caught:
            await gateway.models()
    assert caught.value.fix


async def test_models_are_listed_by_name():
    transport = httpx2.MockTransport(lambda request: httpx2.Response(200, json={"data": [{"id": "nano"}]}))
    async with client(transport) as gateway:
        assert await gateway.models() == ["nano"]


async def test_a_printed_answer_shows_reasoning_apart_and_returns_the_content_alone():
    console = Console(file=io.StringIO(), width=200)
    async with client(streaming(ANSWER)) as gateway:
        assert await print_answer(gateway, {}, console) == "42"
    printed = console.file.getvalue().splitlines()
    assert printed[0] == "Hm. "
    assert printed[2] == "42"
    assert "5 tokens from 20 (16 cached), stop" in printed[3]
