"""No token is decoded from KV that was not verified, and a refused handoff leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from engine.sampling.params import SamplingParams
from fabric.channels import call
from fabric.errors import DataLoss, InvalidArgument, ServiceError, StaleTicket, from_rpc
from fabric.wire import pack_layout
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import decode_pb2
from tests.support.flips import flipped
from tests.support.oracle import Oracle
from tests.support.stack import Stack, worker_stack

TOKENS = list(range(3, 203))
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


async def generate(stack: Stack, ticket: common.Ticket, receipt: common.Receipt) -> list[int]:
    """Tokens of a Generate call. Raises ServiceError; fails the test if a token came before it."""
    tokens: list[int] = []
    try:
        async for reply in stack.generate("r", TOKENS, GREEDY, ticket, receipt):
            tokens += reply.token_ids
    except grpc.aio.AioRpcError as error:
        assert not tokens, "a token came out of a handoff that failed"
        raise from_rpc(error) from error
    return tokens


async def handoff(stack: Stack) -> tuple[common.Ticket, common.Receipt]:
    ticket = await stack.reserve("r", TOKENS, len(TOKENS) + 4)
    done = await stack.prefilled("r", TOKENS, GREEDY, ticket)
    return ticket, done.receipt


@pytest.mark.parametrize("transport", ["inproc://", "ucx://"])
async def test_one_flipped_bit_anywhere_in_the_landing_is_data_loss_and_no_token(model: Path, transport: str) -> None:
    async with worker_stack(model, transport=transport, kvstore=False) as stack:
        ticket, receipt = await handoff(stack)
        extents = receipt.extents[0].extents
        await stack.release(ticket, 1)
        for extent in [*extents[:3], *extents[-3:]]:
            with flipped(stack, extent.group, extent.block) as flips:
                with pytest.raises(DataLoss, match=f"{extent.group} block {extent.block}"):
                    await generate(stack, *await handoff(stack))
                assert flips == [1]
            await stack.idle()


async def test_a_receipt_that_names_too_little_is_data_loss(model: Path) -> None:
    async with worker_stack(model, kvstore=False) as stack:
        for missing in (0, -1):
            ticket, receipt = await handoff(stack)
            del receipt.extents[0].extents[missing]
            with pytest.raises(DataLoss):
                await generate(stack, ticket, receipt)
        await stack.idle()


async def test_a_digest_that_prefill_did_not_compute_is_data_loss(model: Path) -> None:
    async with worker_stack(model, kvstore=False) as stack:
        ticket, receipt = await handoff(stack)
        receipt.extents[0].extents[0].digest ^= 1
        with pytest.raises(DataLoss):
            await generate(stack, ticket, receipt)
        await stack.idle()


async def test_a_ticket_generates_once(model: Path, oracle: Oracle) -> None:
    async with worker_stack(model, kvstore=False) as stack:
        ticket, receipt = await handoff(stack)
        assert await generate(stack, ticket, receipt) == oracle.answer(TOKENS, GREEDY)
        with pytest.raises(StaleTicket, match="released"):
            await generate(stack, ticket, receipt)
        await stack.idle()


async def test_a_ticket_of_an_earlier_incarnation_is_stale(model: Path) -> None:
    async with worker_stack(model, kvstore=False) as stack:
        ticket, receipt = await handoff(stack)
        await stack.restart("decode")
        with pytest.raises(StaleTicket, match="epoch"):
            await generate(stack, ticket, receipt)
        await stack.idle()


async def test_an_unused_ticket_expires_and_frees_everything(model: Path) -> None:
    async with worker_stack(model, kvstore=False, decode={"lease_s": 1.5}) as stack:
        ticket, receipt = await handoff(stack)
        await stack.idle()
        with pytest.raises(StaleTicket, match="expired"):
            await generate(stack, ticket, receipt)


@pytest.mark.parametrize("field", ["version", "revision"])
async def test_a_pair_that_cannot_work_is_refused_at_both_ends_with_both_named(model: Path, field: str) -> None:
    async with worker_stack(model, kvstore=False) as stack:
        ticket = await stack.reserve("r", TOKENS, len(TOKENS) + 4)
        layout = stack.engine("prefill").model.layout
        ours = ticket.model_revision if field == "revision" else layout.groups[0].record_version
        if field == "revision":
            ticket.model_revision = "another"
        else:
            other = replace(layout.groups[0], record_version="another")
            ticket.layout.CopyFrom(pack_layout(replace(layout, groups=(other, *layout.groups[1:]))))
        for refuse in (stack.prefilled("r", TOKENS, GREEDY, ticket), reserve_as(stack, ticket)):
            with pytest.raises(InvalidArgument) as caught:
                await refuse
            assert "another" in caught.value.message and ours in caught.value.message
        await stack.release(ticket, decode_pb2.WRITER_STATE_FINISHED)
        await stack.idle()


async def reserve_as(stack: Stack, ticket: common.Ticket) -> None:
    """Reserves for a prefill worker that has what the ticket says."""
    request = decode_pb2.ReserveRequest(
        request_id="r3",
        token_ids=TOKENS,
        max_total_tokens=210,
        layout=ticket.layout,
        model_revision=ticket.model_revision,
    )
    await call(stack.decode.Reserve, request)


async def test_other_tokens_than_reserved_are_refused(model: Path) -> None:
    async with worker_stack(model, kvstore=False) as stack:
        ticket, receipt = await handoff(stack)
        with pytest.raises(InvalidArgument, match="reserved"):
            try:
                async for _ in stack.generate("r", [*TOKENS[:-1], 7], GREEDY, ticket, receipt):
                    raise AssertionError("a token came out")
            except grpc.aio.AioRpcError as error:
                raise from_rpc(error) from error
        await stack.idle()


@pytest.mark.parametrize(
    ("total", "tokens", "field"),
    [(100_000, TOKENS, "max_total_tokens"), (210, [], "token_ids"), (10, TOKENS, "max_total")],
)
async def test_a_reservation_that_can_never_fit_is_refused_by_name(
    model: Path, total: int, tokens: list[int], field: str
) -> None:
    async with worker_stack(model, kvstore=False) as stack:
        with pytest.raises(ServiceError) as caught:
            await stack.reserve("r", tokens, total)
        assert field in caught.value.field and caught.value.fix
        await stack.idle()
