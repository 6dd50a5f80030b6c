"""A chat's next turn hits the answer that decode stored: what is rendered for it is what was generated, id for id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.sampling.params import SamplingParams
from protos.deepinfer.v1 import gateway_pb2 as pb
from services.worker.settings import NANO
from tests.support.stack import pack_sampling
from tests.support.wholestack import WholeStack, whole_stack

GREETING = [("user", "Hello!"), ("assistant", "Hello! How can I help you today?")]
NAME = "I am nano, a small language model with the DeepSeek-V4 architecture."
OPENING = [("user", "Who are you?"), ("assistant", NAME), *GREETING * 6, ("user", "Good morning!")]
FOLLOW_UP = ("user", "What is 27 + 15?")
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
BLOCK = 128


@dataclass
class Turn:
    text: str = ""
    usage: Any = None


async def turn(stack: WholeStack, messages: list[tuple[str, str]], use_cache: bool = True) -> Turn:
    request = pb.ChatRequest(
        model=stack.model.name,
        messages=[pb.ChatMessage(role=role, content=content) for role, content in messages],
        thinking=False,
        sampling=pack_sampling(GREEDY),
        use_cache=use_cache,
    )
    said = Turn()
    async for reply in stack.stub.Chat(request, timeout=120):
        said.text += reply.content
        if reply.HasField("finish"):
            said.usage = reply.finish.usage
    await stack.until_idle(10.0)
    return said


async def test_the_next_turn_of_a_chat_hits_the_answer_to_the_last_one() -> None:
    async with whole_stack(NANO, decodes=1, kvstore=True) as stack:
        first = await turn(stack, OPENING)
        sealed = (first.usage.prompt_tokens + first.usage.completion_tokens - 1) // BLOCK
        assert first.usage.prompt_tokens // BLOCK < sealed, "a block ends within the answer"
        spoken = [*OPENING, ("assistant", first.text), FOLLOW_UP]
        second = await turn(stack, spoken)
        assert second.usage.cached_tokens == sealed * BLOCK
        cold = await turn(stack, spoken, use_cache=False)
        assert (cold.text, cold.usage.cached_tokens) == (second.text, 0)
