"""What a caller says during its prefill: a ticket once, a cancel at any time, nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from fabric.errors import Cancelled, InvalidArgument
from fabric.wire import pack_layout
from protos.deepinfer.v1 import common_pb2, prefill_pb2
from services.prefill.inbound import Inbound
from tests.support.fakefamily import LAYOUT

ATTACH = prefill_pb2.PrefillRequest(
    attach=prefill_pb2.PrefillAttach(
        ticket=common_pb2.Ticket(id="t", landings=[common_pb2.Landing(id="l")], layout=pack_layout(LAYOUT))
    )
)
CANCEL = prefill_pb2.PrefillRequest(cancel=prefill_pb2.PrefillCancel())
START = prefill_pb2.PrefillRequest(start=prefill_pb2.PrefillStart())


async def saying(*messages: prefill_pb2.PrefillRequest) -> AsyncIterator[prefill_pb2.PrefillRequest]:
    for message in messages:
        yield message


async def test_work_gets_the_ticket() -> None:
    inbound = Inbound(saying(ATTACH))
    got: list[str] = []

    async def work() -> None:
        got.append((await inbound.ticket).id)

    await inbound.during(work())
    assert got == ["t"]


async def test_cancel_ends_the_work_before_it_is_answered() -> None:
    inbound = Inbound(saying(ATTACH, CANCEL))
    ended: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(Cancelled):
        await inbound.during(work())
    assert ended == [True]


async def test_a_stream_that_ends_without_a_ticket_fails_who_waits_for_it() -> None:
    inbound = Inbound(saying())

    async def work() -> None:
        await inbound.ticket

    with pytest.raises(InvalidArgument, match="no ticket"):
        await inbound.during(work())


@pytest.mark.parametrize("messages", [(START,), (ATTACH, ATTACH)])
async def test_what_does_not_belong_there_is_refused(messages: tuple[prefill_pb2.PrefillRequest, ...]) -> None:
    inbound = Inbound(saying(*messages))

    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(InvalidArgument, match="no place"):
        await inbound.during(work())
