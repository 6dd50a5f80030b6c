"""Answers that outlive their workers: every token once, in order, as if nothing had happened (promise 10)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest

from fabric.errors import DataLoss, Exhausted, ServiceError, StaleTicket, Unavailable
from protos.deepinfer.v1 import common_pb2, decode_pb2, gateway_pb2, gateway_pb2_grpc
from tests.support import bytemodel, fakeworkers
from tests.support.frontstack import FrontStack, events, front_stack, until
from tests.support.promises import Recorder

KINDS = (Unavailable, DataLoss, StaleTicket, lambda text: Exhausted(text, retry_after_s=0.01))
STREAMS = 200


@dataclass
class Fates:
    """For every prompt an answer, and the tokens before which the worker that generates it fails."""

    random: Random
    answers: dict[tuple[int, ...], list[int]]
    kills: dict[tuple[int, ...], list[tuple[int, ServiceError]]]

    @staticmethod
    def draw(seed: int) -> Fates:
        """Answers of 2 to 40 tokens; each stream is hit one to three times, the first time anywhere."""
        random, answers, kills = Random(seed), {}, {}
        for number in range(STREAMS):
            prompt = tuple(bytemodel.encode(f"prompt {number}"))
            letters = "".join(random.choices("abcdefgh", k=random.randrange(1, 40)))
            answers[prompt] = [*bytemodel.encode(letters), bytemodel.EOS]
            places = sorted(random.choices(range(len(answers[prompt])), k=random.randrange(1, 4)))
            kills[prompt] = [(place, random.choice(KINDS[: 4 if place else 3])("killed")) for place in places]
        return Fates(random, answers, kills)

    def answer(self, prompt: Sequence[int]) -> list[int]:
        return self.answers[tuple(prompt)]

    def doom(self, request: decode_pb2.DecodeServiceGenerateRequest, index: int) -> ServiceError | None:
        pending = self.kills[tuple(request.token_ids[: len(request.token_ids) - request.emitted_tokens])]
        return pending.pop(0)[1] if pending and index >= pending[0][0] else None


async def generated(stub: Any, prompt: Sequence[int], **sampling: Any) -> list[Any]:
    """All replies to one prompt; their indexes are dense."""
    request = gateway_pb2.GatewayServiceGenerateRequest(
        model=fakeworkers.MODEL,
        token_ids=gateway_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(**sampling),
    )
    replies, due = [], 0
    async for reply in stub.Generate(request, timeout=60):
        assert reply.first_index == due
        due += len(reply.token_ids)
        replies.append(reply)
    return replies


@pytest.mark.promise(10)
async def test_200_streams_killed_at_random_tokens_are_whole(tmp_path: Path, promise: Recorder) -> None:
    fates = Fates.draw(seed=7)
    hits = sum(len(kills) for kills in fates.kills.values())
    async with (
        front_stack(tmp_path, prefills=2, decodes=3, retry_burst=2 * hits, coalesce_ms=0) as stack,
        grpc.aio.insecure_channel(stack.grpc) as channel,
    ):
        stack.script.answer, stack.script.doom, stack.script.cached_tokens = fates.answer, fates.doom, 3
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        answers = await asyncio.gather(*(generated(stub, prompt) for prompt in fates.answers))
        await stack.until_idle(5.0)
        lives = [start for served in stack.prefills for start in served.worker.watched.requests]
    for (prompt, expected), replies in zip(fates.answers.items(), answers, strict=True):
        assert [token for reply in replies for token in reply.token_ids] == expected
        usage = replies[-1].finish.usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (len(prompt), 3, len(expected))
    assert not any(fates.kills.values()) and len(lives) == STREAMS + hits
    seeds: dict[tuple[int, ...], set[int]] = {}
    for start in lives:
        prompt = tuple(start.token_ids[: len(start.token_ids) - start.emitted_tokens])
        seeds.setdefault(prompt, set()).add(start.sampling.seed)
    assert {len(drawn) for drawn in seeds.values()} == {1}, "a seed changed on the way"
    promise(10, f"streams as undisturbed, indexes dense, after {hits} kills at random tokens", STREAMS, exactly=200)


@pytest.mark.parametrize("index", [1, 4, 5, 8])
async def test_text_stop_strings_and_log_probabilities_go_on_where_they_were(two_pairs: FrontStack, index: int) -> None:
    """The stop string is spelled by tokens of both lives; what may begin one stays held back across the move."""
    stack = two_pairs
    tokens = [*bytemodel.encode("</think>ab"), *bytemodel.encode("STOPPED")]
    stack.script.answer = lambda prompt: tokens
    at = len(tokens) - 9 + index
    stack.script.faults[f"token:{at}"] = [Unavailable("killed")]
    reply = await stack.chat(stream=True, stop=["STOP", "SxOP"], logprobs=True, stream_options={"include_usage": True})
    assert reply.text.rstrip().endswith("[DONE]")
    chunks = events(reply.text)
    assert "".join((c["choices"] or [{"delta": {}}])[0]["delta"].get("content") or "" for c in chunks) == "ab"
    assert chunks[-1]["usage"]["completion_tokens"] == len(tokens) - 3
    if at < len(tokens) - 3:
        assert sum(len(s.worker.watched.requests) for s in stack.decodes) == 2


async def test_a_killed_worker_moves_its_stream_and_a_whole_body_too(two_pairs: FrontStack) -> None:
    stack = two_pairs
    tokens = [*bytemodel.encode("</think>abcdefgh"), bytemodel.EOS]
    stack.script.answer = lambda prompt: tokens
    stack.script.gates["token:5"] = asyncio.Event()
    asking = [asyncio.create_task(stack.chat(stream=streamed)) for streamed in (True, False)]
    await stack.script.wait_for("token:5")
    victim = next(served for served in stack.decodes if served.worker.watched.running)
    await victim.kill()
    stack.script.gates["token:5"].set()
    streamed, whole = await asyncio.gather(*asking)
    told = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in events(streamed.text))
    assert told == whole.json()["choices"][0]["message"]["content"] == "abcdefgh"


async def test_a_client_that_leaves_while_its_answer_moves_frees_everything(two_pairs: FrontStack) -> None:
    stack = two_pairs
    tokens = [*bytemodel.encode("</think>abcdefgh"), bytemodel.EOS]
    stack.script.answer = lambda prompt: tokens
    stack.script.faults["token:5"] = [Unavailable("killed")]
    stack.script.gates["token:5"] = asyncio.Event()
    asking = asyncio.create_task(stack.chat(stream=True))
    await stack.script.wait_for("token:5")
    stack.script.gates["prefill"] = asyncio.Event()
    stack.script.reached.pop("prefill")
    stack.script.gates["token:5"].set()
    await stack.script.wait_for("prefill")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await stack.until_idle(10.0)


@pytest.mark.slow
@pytest.mark.promise(17, 18)
@pytest.mark.parametrize("side", ["prefills", "decodes"])
async def test_of_400_requests_none_fails_when_one_of_two_workers_dies_halfway(
    two_pairs: FrontStack, side: str, promise: Recorder
) -> None:
    """8 clients, 50 requests each."""
    stack, answered, statuses, ends = two_pairs, 0, list[int](), list[float]()
    tokens = [*bytemodel.encode("</think>abcdefghij"), bytemodel.EOS]
    stack.script.answer, stack.script.pause_s = (lambda prompt: tokens), 0.001
    halfway = asyncio.Event()

    async def client(number: int) -> None:
        nonlocal answered
        for _ in range(50):
            reply = await stack.chat(f"client {number}")
            statuses.append(reply.status_code)
            ends.append(time.monotonic())
            assert reply.json()["choices"][0]["message"]["content"] == "abcdefghij"
            answered += 1
            if answered == 200:
                halfway.set()

    asking = asyncio.gather(*(client(number) for number in range(8)))
    await halfway.wait()
    await getattr(stack, side)[0].kill()
    await asking
    await until(lambda: not stack.decodes[1].worker.tickets, 10.0)
    number, bar = (18, 400) if side == "prefills" else (17, 396)
    promise(number, "fake workers: of 400 requests, answered", statuses.count(200), at_least=bar)
    silence_s = max(later - earlier for earlier, later in pairwise(ends[199:]))
    promise(number, "fake workers: longest time without an answer", silence_s, at_most=5.0, unit="s")
