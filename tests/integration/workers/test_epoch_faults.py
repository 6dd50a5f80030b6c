"""Whatever an earlier incarnation gave out is refused by the next one and changes none of its bytes (promise 5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from engine.sampling.params import SamplingParams
from fabric.channels import call
from fabric.errors import ServiceError, from_rpc
from fabric.wire import pack_layout
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import decode_pb2
from tests.support.oracle import Oracle
from tests.support.promises import Recorder
from tests.support.stack import Stack, worker_stack

TICKETS, LIVE = 40, 8
PROMPTS = [[3 + (number + 7 * index) % 500 for index in range(150)] for number in range(TICKETS)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
Old = tuple[str, list[int], common.Ticket, common.Receipt]


async def handoff(stack: Stack, name: str, prompt: list[int]) -> Old:
    ticket = await stack.reserve(name, prompt, len(prompt) + GREEDY.max_tokens)
    return name, prompt, ticket, (await stack.prefilled(name, prompt, GREEDY, ticket)).receipt


def replays(stack: Stack, old: Old) -> Iterator[Awaitable[Any]]:
    """Everything that can be done with a ticket, done with one whose incarnation is over."""
    name, prompt, ticket, receipt = old
    yield drained(stack.generate(name, prompt, GREEDY, ticket, receipt))
    yield call(stack.decode.Release, decode_pb2.ReleaseRequest(ticket_id=ticket.id, epoch=ticket.epoch))
    yield call(stack.decode.Reserve, reservation(stack, prompt, ticket.epoch))
    yield stack.prefilled(f"again-{name}", prompt, GREEDY, aimed(stack, ticket, f"again-{name}"))


def reservation(stack: Stack, prompt: list[int], epoch: int) -> decode_pb2.ReserveRequest:
    """One that would be granted, but for the incarnation that it means."""
    model = stack.engine("prefill").model
    return decode_pb2.ReserveRequest(
        request_id="again",
        token_ids=prompt,
        max_total_tokens=len(prompt) + GREEDY.max_tokens,
        layout=pack_layout(model.layout),
        model_revision=model.revision,
        epoch=epoch,
    )


def aimed(stack: Stack, ticket: common.Ticket, name: str) -> common.Ticket:
    """The old ticket, its landings where the new incarnation listens: nothing but the epoch is wrong with it."""
    replay = common.Ticket()
    replay.CopyFrom(ticket)
    replay.request_id = name
    for landing in replay.landings:
        landing.address.url = stack.running["decode"].servicer.core.link.address.url
    return replay


async def drained(replies: Any) -> None:
    try:
        async for _ in replies:
            raise AssertionError("a token came out")
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from error


async def code_of(replaying: Awaitable[Any]) -> str:
    try:
        await replaying
    except ServiceError as error:
        return error.code
    return "ok"


def bytes_of(stack: Stack) -> tuple[np.ndarray, np.ndarray]:
    """All blocks of decode, and the landing memory that is granted to live tickets."""
    pool = stack.engine("decode").pool
    return pool.blocks.clone().numpy().view(np.uint8), stack.desk._landings._memory.copy()


@pytest.mark.slow
@pytest.mark.promise(5)
async def test_tickets_of_an_earlier_incarnation_change_nothing(model: Path, oracle: Oracle, promise: Recorder) -> None:
    room = {"instance": "decode-0", "max_sequences": TICKETS, "kv_memory_mb": 128}
    async with worker_stack(model, transport="tcp://127.0.0.1:0", kvstore=False, decode=room) as stack:
        old = [await handoff(stack, f"old-{number}", prompt) for number, prompt in enumerate(PROMPTS)]
        await stack.restart("decode")
        await stack.ask(PROMPTS[0], replace(GREEDY, max_tokens=2))
        live = [await handoff(stack, f"live-{number}", prompt) for number, prompt in enumerate(PROMPTS[:LIVE])]
        blocks, landings = bytes_of(stack)
        codes = Counter([await code_of(replaying) for each in old for replaying in replays(stack, each)])
        after_blocks, after_landings = bytes_of(stack)
        changed = int((blocks != after_blocks).sum() + (landings != after_landings).sum())
        for name, prompt, ticket, receipt in live:
            replies = stack.generate(name, prompt, GREEDY, ticket, receipt)
            assert [token async for reply in replies for token in reply.token_ids] == oracle.answer(prompt, GREEDY)
        await stack.idle()
    print(dict(codes))
    refused = codes["stale_ticket"] / codes.total()
    promise(5, f"{codes.total()} replays of {TICKETS} tickets: FAILED_PRECONDITION", refused, exactly=1)
    promise(5, "bytes of blocks and landings that changed", changed, exactly=0)
