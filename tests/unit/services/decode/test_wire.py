"""A Generate call says everything at once, or opens early and sends its receipt later; either way it means the same."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from fabric.errors import InvalidArgument
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import decode_pb2 as pb
from services.decode.wire import generate_ask

RECEIPT = common.Receipt(
    ticket_id="t",
    epoch=7,
    digest_kind=common.DIGEST_KIND_XXH3_64,
    tokens=3,
    extents=[common.ExtentList()],
    first_token=common.FirstToken(token_id=9, state=common.SamplingState(seed=1, emitted_tokens=1)),
)


def opening(**more: object) -> pb.DecodeServiceGenerateRequest:
    fields = {"ticket_id": "t", "request_id": "r", "token_ids": [4, 5, 6], "emitted_tokens": 1, **more}
    return pb.DecodeServiceGenerateRequest(**fields)


async def saying(*messages: pb.DecodeServiceGenerateRequest) -> AsyncIterator[pb.DecodeServiceGenerateRequest]:
    for message in messages:
        yield message


async def test_a_receipt_that_comes_later_asks_for_the_same_as_one_that_came_at_once() -> None:
    at_once = await generate_ask(saying(opening(receipt=RECEIPT, gather_ms=20)))
    later = await generate_ask(saying(opening(gather_ms=20), pb.DecodeServiceGenerateRequest(receipt=RECEIPT)))
    assert at_once == later
    assert later.gather_s == 0.02
    assert (later.tokens, later.emitted_tokens, later.receipt.epoch, later.receipt.first_token) == ((4, 5, 6), 1, 7, 9)


@pytest.mark.parametrize("messages", [(), (opening(),)])
async def test_a_call_that_ends_before_its_receipt_is_refused(
    messages: tuple[pb.DecodeServiceGenerateRequest, ...],
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await generate_ask(saying(*messages))
    assert refused.value.field == "receipt"


async def test_a_second_message_without_a_receipt_is_refused() -> None:
    with pytest.raises(InvalidArgument) as refused:
        await generate_ask(saying(opening(), pb.DecodeServiceGenerateRequest()))
    assert refused.value.field.startswith("receipt")
