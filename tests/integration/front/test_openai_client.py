"""The official OpenAI client talks to us as to OpenAI."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from fabric.errors import Exhausted
from tests.support import bytemodel, fakeworkers
from tests.support.frontstack import FrontStack

CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="add">\n'
    '<｜DSML｜ parameter name="a" string="false">12</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="why" string="true">é"</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
    }
]
USER: Any = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture(loop_scope="session")
async def client(stack: FrontStack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"http://{stack.http}/v1", api_key="any") as ready:
        yield ready


def says(stack: FrontStack, text: str) -> None:
    tokens = [*bytemodel.encode(text), bytemodel.EOS]
    stack.script.answer = lambda prompt: tokens


async def test_it_streams_reasoning_and_content(stack: FrontStack, client: AsyncOpenAI) -> None:
    says(stack, "so é</think>answer 😀")
    stream = await client.chat.completions.create(
        model=fakeworkers.MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "answer 😀"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "so é"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert usage is not None and chunks[-1].choices == []
    assert usage.completion_tokens == len(bytemodel.encode("so é</think>answer 😀")) + 1
    assert usage.completion_tokens_details and usage.completion_tokens_details.reasoning_tokens == 5


async def test_it_streams_tool_calls(stack: FrontStack, client: AsyncOpenAI) -> None:
    says(stack, f"sum</think>{CALL}")
    stream = await client.chat.completions.create(model=fakeworkers.MODEL, messages=USER, tools=TOOLS, stream=True)
    chunks = [chunk async for chunk in stream]
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert calls[0].id and calls[0].function and calls[0].function.name == "add"
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    assert json.loads(arguments) == {"a": 12, "why": 'é"'}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_a_tool_result_can_be_sent_back_with_the_echoed_answer(stack: FrontStack, client: AsyncOpenAI) -> None:
    says(stack, f"sum</think>{CALL}")
    first = await client.chat.completions.create(model=fakeworkers.MODEL, messages=USER, tools=TOOLS)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls" and message.tool_calls
    says(stack, "</think>24")
    tool: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "24"}
    again = await client.chat.completions.create(model=fakeworkers.MODEL, messages=[*USER, message, tool], tools=TOOLS)
    assert again.choices[0].message.content == "24"
    prompt = bytes_of(stack.prefills[0].worker.watched.requests[-1].token_ids)
    assert "<tool_result>24</tool_result>" in prompt


def bytes_of(token_ids: Any) -> str:
    return str(bytemodel.tokenizer().decode(list(token_ids), skip_special_tokens=False))


async def test_it_answers_at_once_with_usage_and_logprobs(stack: FrontStack, client: AsyncOpenAI) -> None:
    stack.script.cached_tokens = 7
    says(stack, "</think>ok")
    answer = await client.chat.completions.create(
        model=fakeworkers.MODEL, messages=USER, logprobs=True, top_logprobs=2, temperature=0, seed=5
    )
    usage = answer.usage
    assert usage and usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens == 7
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.content and [entry.token for entry in logprobs.content] == ["o", "k"]


async def test_stop_strings_end_the_answer_and_are_not_shown(stack: FrontStack, client: AsyncOpenAI) -> None:
    says(stack, "</think>one END two")
    stream = await client.chat.completions.create(model=fakeworkers.MODEL, messages=USER, stop=["END"], stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one "
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_a_stop_string_of_text_and_control_token_ends_the_answer(stack: FrontStack, client: AsyncOpenAI) -> None:
    says(stack, "</think>one END<｜end▁of▁sentence｜>two")
    answer = await client.chat.completions.create(
        model=fakeworkers.MODEL,
        messages=USER,
        stop=["END<｜end▁of▁sentence｜>"],
        extra_body={"ignore_eos": True},
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one ", "stop")
    assert answer.usage and answer.usage.completion_tokens == len(bytemodel.encode("</think>one END")) + 1


async def test_length_ends_the_answer(stack: FrontStack, client: AsyncOpenAI) -> None:
    says(stack, "</think>one two")
    answer = await client.chat.completions.create(model=fakeworkers.MODEL, messages=USER, max_tokens=4)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one", "length")


async def test_extensions_reach_the_workers(stack: FrontStack, client: AsyncOpenAI) -> None:
    extra = {"top_k": 5, "min_p": 0.25, "repetition_penalty": 1.5, "ignore_eos": True, "min_tokens": 2}
    await client.chat.completions.create(model=fakeworkers.MODEL, messages=USER, temperature=0, extra_body=extra)
    for worker in (stack.prefills[0].worker, stack.decodes[0].worker):
        sampling = worker.watched.requests[-1].sampling
        assert {name: getattr(sampling, name) for name in extra} == extra
        assert sampling.HasField("temperature") and sampling.temperature == 0.0
        assert sampling.HasField("seed")


async def test_models_are_listed(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [fakeworkers.MODEL]
    assert (await client.models.retrieve(fakeworkers.MODEL)).id == fakeworkers.MODEL


async def test_errors_arrive_as_the_clients_own_types(stack: FrontStack, client: AsyncOpenAI) -> None:
    client = client.with_options(max_retries=0)
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="gpt", messages=USER)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=fakeworkers.MODEL, messages=USER, n=2)
    assert bad.value.param == "n"
    stack.script.faults["reserve"] = [Exhausted("full", retry_after_s=3.0)] * 2
    with pytest.raises(openai.RateLimitError) as full:
        await client.chat.completions.create(model=fakeworkers.MODEL, messages=USER)
    assert full.value.response.headers["retry-after"] == "3"
