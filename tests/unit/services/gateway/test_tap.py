"""The tap: reads ahead, within bounds, and gives back whatever came together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fabric.errors import Internal, Unavailable
from protos.deepinfer.v1 import common_pb2, decode_pb2
from services.gateway.ledger import Ledger
from services.gateway.tap import MAX_BUFFERED_TOKENS, Tap
from tests.support.frontstack import until


class Source:
    """A Generate stream fed by the test; counts how far it was read."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Any] = asyncio.Queue()
        self.read = 0
        self.cancelled = False

    def put(self, first_index: int, *tokens: int, finish: int | None = None) -> None:
        end = None
        if finish is not None:
            end = decode_pb2.DecodeFinish(reason=common_pb2.FINISH_REASON_STOP, completion_tokens=finish)
        message = decode_pb2.DecodeServiceGenerateResponse(first_index=first_index, token_ids=tokens, finish=end)
        self.items.put_nowait(message)

    async def send(self, message: Any) -> None: ...

    async def receive(self) -> Any:
        item = await self.items.get()
        if isinstance(item, Exception):
            raise item
        self.read += 1
        return item

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture
async def source() -> Source:
    return Source()


@pytest.fixture
async def tap(source: Source) -> Tap:
    return Tap(source, Ledger(1), logprobs=False)


async def test_what_came_together_is_one_batch(source: Source, tap: Tap) -> None:
    source.put(0, 5)
    source.put(1, 6, 7)
    await until(lambda: source.read == 2, 20.0)
    batch = await tap.take()
    assert (batch.first_index, list(batch.token_ids), batch.finish) == (0, [5, 6, 7], None)
    source.put(3, 8, finish=4)
    batch = await tap.take()
    assert (batch.first_index, list(batch.token_ids)) == (3, [8]) and batch.finish


async def test_a_part_of_what_came_leaves_the_rest_and_its_end_for_later(source: Source, tap: Tap) -> None:
    source.put(0, 5, 6)
    source.put(2, 7, finish=3)
    await until(lambda: source.read == 2, 20.0)
    first, rest = await tap.take(most=1), await tap.take()
    assert (first.first_index, list(first.token_ids), first.finish) == (0, [5], None)
    assert (rest.first_index, list(rest.token_ids)) == (1, [6, 7]) and rest.finish


async def test_gathering_ends_with_the_last_token(source: Source, tap: Tap) -> None:
    source.put(0, 5)
    source.put(1, 6)
    source.put(2, finish=2)
    async with asyncio.timeout(5.0):
        await tap.gather(60.0)
    assert list((await tap.take()).token_ids) == [5, 6]


async def test_a_slow_reader_stops_the_stream(source: Source, tap: Tap) -> None:
    for index in range(MAX_BUFFERED_TOKENS + 50):
        source.put(index, 1)
    await until(lambda: source.read == MAX_BUFFERED_TOKENS, 20.0)
    await asyncio.sleep(0)
    assert source.read == MAX_BUFFERED_TOKENS
    assert len((await tap.take()).token_ids) == MAX_BUFFERED_TOKENS
    await until(lambda: source.read == MAX_BUFFERED_TOKENS + 50, 20.0)


async def test_tokens_before_a_failure_are_not_lost(source: Source, tap: Tap) -> None:
    source.put(0, 5)
    source.items.put_nowait(Unavailable("gone"))
    await until(lambda: source.items.empty(), 20.0)
    assert list((await tap.take()).token_ids) == [5]
    with pytest.raises(Unavailable, match="gone"):
        await tap.take()


async def test_an_end_without_a_finish_is_a_failure(source: Source, tap: Tap) -> None:
    source.items.put_nowait(None)
    with pytest.raises(Unavailable, match="without a finish"):
        await tap.take()


async def test_logprobs_that_nobody_asked_for_are_a_defect(source: Source, tap: Tap) -> None:
    message = decode_pb2.DecodeServiceGenerateResponse(token_ids=[1], logprobs=[common_pb2.TokenLogprob()])
    source.items.put_nowait(message)
    with pytest.raises(Internal):
        await tap.take()


async def test_closing_ends_the_stream(source: Source, tap: Tap) -> None:
    tap.close()
    assert source.cancelled
