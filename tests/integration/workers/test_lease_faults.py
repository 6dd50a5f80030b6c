"""Readers that come later than their lease: recomputed or refused, never wrong (promise 6)."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from random import Random

import grpc
import pytest

from engine.sampling.params import SamplingParams
from fabric.errors import Exhausted, ServiceError, StaleTicket, from_rpc
from protos.deepinfer.v1 import common_pb2 as common
from tests.support.oracle import Oracle
from tests.support.promises import Recorder
from tests.support.stack import Stack, worker_stack

REQUESTS, AT_ONCE, LEASE_S, LATEST_S = 300, 32, 0.5, 2.0
PROMPTS = [[3 + (number + 7 * index) % 500 for index in range(30 + 8 * number)] for number in range(24)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


async def reserved(stack: Stack, name: str, prompt: list[int]) -> common.Ticket:
    """A ticket as soon as there is room."""
    while True:
        try:
            return await stack.reserve(name, prompt, len(prompt) + GREEDY.max_tokens)
        except Exhausted:
            await asyncio.sleep(0.05)


async def read_after(stack: Stack, name: str, prompt: list[int], delay_s: float) -> list[int]:
    """Tokens of one request whose reader comes so long after its receipt. Raises ServiceError."""
    ticket = await reserved(stack, name, prompt)
    done = await stack.prefilled(name, prompt, GREEDY, ticket)
    await asyncio.sleep(delay_s)
    tokens: list[int] = []
    try:
        async for reply in stack.generate(name, prompt, GREEDY, ticket, done.receipt):
            tokens += reply.token_ids
    except grpc.aio.AioRpcError as error:
        assert not tokens
        raise from_rpc(error) from error
    return tokens


@pytest.mark.slow
@pytest.mark.promise(6)
async def test_of_300_late_readers_none_gets_wrong_tokens(model: Path, oracle: Oracle, promise: Recorder) -> None:
    """Memory for about a third of those that wait: what a lease gave back is another's at once."""
    expected = [oracle.answer(prompt, GREEDY) for prompt in PROMPTS]
    random, ends, room = Random(6), Counter[str](), asyncio.Semaphore(AT_ONCE)

    async def request(stack: Stack, number: int, delay_s: float) -> None:
        which = number % len(PROMPTS)
        async with room:
            for again in range(20):
                try:
                    tokens = await read_after(stack, f"r{number}-{again}", PROMPTS[which], 0.0 if again else delay_s)
                except StaleTicket:
                    ends["recomputed"] += not again
                    continue
                except ServiceError as error:
                    ends[error.code] += 1
                    return
                ends["right" if tokens == expected[which] else "wrong"] += 1
                return
            ends["given up"] += 1

    decode = {"lease_s": LEASE_S, "kv_memory_mb": 8, "max_tickets": 64}
    async with worker_stack(model, kvstore=False, decode=decode) as stack:
        await asyncio.gather(*(request(stack, number, random.uniform(0, LATEST_S)) for number in range(REQUESTS)))
        await stack.idle()
    print(dict(ends))
    promise(6, f"lease {LEASE_S} s, readers 0 to {LATEST_S:.0f} s late: wrong answers", ends["wrong"], exactly=0)
    promise(6, "answers that are right, recomputed where the lease was over", ends["right"], exactly=REQUESTS)
    promise(6, "of them, met an expired lease", ends["recomputed"], at_least=100)
