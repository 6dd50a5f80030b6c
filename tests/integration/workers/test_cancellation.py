"""Whoever leaves, at whatever point, nothing stays held on either side and the next request works."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from engine.sampling.params import SamplingParams
from fabric.errors import Cancelled, DeadlineExceeded, Exhausted, InvalidArgument, from_rpc
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import decode_pb2, prefill_pb2
from tests.support.frontstack import until
from tests.support.oracle import Oracle
from tests.support.stack import Stack, pack_sampling, worker_stack

TOKENS = [3 + index % 500 for index in range(1200)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
UNKNOWN, FINISHED = decode_pb2.WRITER_STATE_UNKNOWN, decode_pb2.WRITER_STATE_FINISHED


async def next_request_works(stack: Stack, oracle: Oracle) -> None:
    await stack.idle()
    tokens = TOKENS[5:150]
    assert (await stack.ask(tokens, GREEDY)).tokens == oracle.answer(tokens, GREEDY)
    await stack.idle()


async def progress_until(stack: Stack, ticket: common.Ticket | None, kind: str, polite: bool = True) -> None:
    """Starts a prefill and leaves it at its first message of `kind`: by a cancel message, or by cutting the stream."""
    stream = stack.progress("left", TOKENS, GREEDY, ticket, polite=polite)
    async for reply in stream:
        if reply.WhichOneof("progress") == kind:
            break
    await stream.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("writer", [FINISHED, UNKNOWN])
@pytest.mark.parametrize("kind", ["queued", "started", "chunk"])
async def test_after_a_cancel_message_nothing_more_is_written_and_both_sides_know_it(
    model: Path, oracle: Oracle, kind: str, writer: decode_pb2.WriterState
) -> None:
    async with worker_stack(model) as stack:
        ticket = await stack.reserve("left", TOKENS, len(TOKENS) + 6)
        await progress_until(stack, ticket, kind)
        await stack.release(ticket, writer)  # where the client does not know, prefill itself has told decode
        await next_request_works(stack, oracle)


@pytest.mark.parametrize("kind", ["started", "chunk"])
async def test_a_client_that_vanishes_from_a_prefill_frees_both_sides(model: Path, oracle: Oracle, kind: str) -> None:
    async with worker_stack(model) as stack:
        ticket = await stack.reserve("left", TOKENS, len(TOKENS) + 6)
        await progress_until(stack, ticket, kind, polite=False)
        await stack.release(ticket, UNKNOWN)  # prefill itself tells decode that it has finished
        await next_request_works(stack, oracle)


@pytest.mark.parametrize("kind", ["queued", "started", "chunk"])
async def test_a_client_that_vanishes_before_it_attached_frees_both_sides(
    model: Path, oracle: Oracle, kind: str
) -> None:
    async with worker_stack(model) as stack:
        ticket = await stack.reserve("left", TOKENS, len(TOKENS) + 6)
        await progress_until(stack, None, kind, polite=False)
        await stack.release(ticket, decode_pb2.WRITER_STATE_NEVER_STARTED)
        await next_request_works(stack, oracle)


async def test_compute_stops_at_the_next_chunk_after_the_client_left(model: Path) -> None:
    async with worker_stack(model, kvstore=False, prefill={"chunk_tokens": 32}) as stack:
        await progress_until(stack, None, "chunk")
        await stack.idle()
        assert (await stack.stats("prefill")).computed_tokens < len(TOKENS) // 2


async def test_a_client_that_leaves_after_the_receipt_frees_both_sides(model: Path, oracle: Oracle) -> None:
    async with worker_stack(model) as stack:
        ticket = await stack.reserve("left", TOKENS, len(TOKENS) + 6)
        await stack.prefilled("left", TOKENS, GREEDY, ticket)
        assert await stack.release(ticket, FINISHED)
        assert not await stack.release(ticket, FINISHED)
        await next_request_works(stack, oracle)


async def test_a_client_that_leaves_generate_frees_both_sides(model: Path, oracle: Oracle) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=800, ignore_eos=True)
    async with worker_stack(model) as stack:
        ticket = await stack.reserve("left", TOKENS, len(TOKENS) + 800)
        done = await stack.prefilled("left", TOKENS, long, ticket)
        call = stack.generate("left", TOKENS, long, ticket, done.receipt)
        async for _ in call:
            break
        call.cancel()
        await next_request_works(stack, oracle)
        assert (await stack.stats("decode")).output_tokens < 400


async def test_a_decode_that_does_not_answer_fails_the_push_in_time(model: Path, oracle: Oracle) -> None:
    async with worker_stack(model, prefill={"push_timeout_s": 1.5}) as stack:
        link = stack.running["decode"].servicer.core.link
        ticket = await stack.reserve("left", TOKENS, len(TOKENS) + 6)
        link.freeze()
        with pytest.raises(DeadlineExceeded):
            await stack.prefilled("left", TOKENS, GREEDY, ticket)
        link.thaw()
        await stack.release(ticket, FINISHED)
        await next_request_works(stack, oracle)


async def test_a_landing_in_doubt_is_kept_apart_until_its_writer_says_it_is_done(model: Path) -> None:
    async with worker_stack(model, kvstore=False, prefill={"push_timeout_s": 1.5}) as stack:
        link = stack.running["decode"].servicer.core.link
        ticket = await stack.reserve("left", TOKENS, len(TOKENS) + 6)
        link.freeze()
        with pytest.raises(DeadlineExceeded):
            await stack.prefilled("left", TOKENS, GREEDY, ticket)
        await stack.release(ticket, UNKNOWN)
        assert stack.desk.quarantined == 1 and stack.desk._landings.stats().quarantined > 0
        assert (await stack.stats("decode")).blocks_held == 0
        await stack.release(ticket, FINISHED)
        await stack.idle()


def in_flight(stack: Stack) -> int:
    return int(stack.running["prefill"].chassis._in_flight.finite)


async def test_a_call_that_is_cut_ends_at_once_and_its_blocks_stay_while_they_are_written(model: Path) -> None:
    async with worker_stack(model, kvstore=False, prefill={"push_timeout_s": 20.0}) as stack:
        link, worker = stack.servicer("decode").core.link, stack.servicer("prefill").worker
        ticket = await stack.reserve("left", TOKENS, len(TOKENS) + 6)
        link.freeze()
        await progress_until(stack, ticket, "chunk", polite=False)
        await until(lambda: not in_flight(stack), within_s=5.0)
        stats = await stack.stats("prefill")
        assert (stats.running, stats.waiting, worker.live, worker.unfinished) == (0, 0, 0, 1)
        assert stats.held == 1 and stats.blocks_held > 0
        assert stack.running["prefill"].chassis._progress.pending(), "a drain waits for it"
        link.thaw()
        await stack.release(ticket, UNKNOWN)  # prefill itself tells decode when it has finished
        await stack.idle()
        assert not worker.unfinished


async def test_an_error_that_a_caller_hears_comes_after_the_last_write(model: Path) -> None:
    async with worker_stack(model, kvstore=False, prefill={"push_timeout_s": 1.0}) as stack:
        worker = stack.servicer("prefill").worker
        ticket = await stack.reserve("left", TOKENS, len(TOKENS) + 6)
        stack.servicer("decode").core.link.freeze()
        await progress_until(stack, ticket, "chunk")
        assert not worker.unfinished
        assert await stack.release(ticket, FINISHED)


@pytest.mark.parametrize("lost", [True, False])
async def test_a_caller_that_cancels_hears_of_a_deadline_where_a_write_may_still_arrive(
    model: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Whatever else a gateway hears, it tells decode that the landing may be used again."""
    async with worker_stack(model, kvstore=False, prefill={"push_timeout_s": 0.5 if lost else 20.0}) as stack:
        link, worker, begun = stack.servicer("decode").core.link, stack.servicer("prefill").worker, asyncio.Event()
        receive = link._receive
        monkeypatch.setattr(link, "_receive", lambda copies: (receive(copies), begun.set()))
        ticket = await stack.reserve("left", TOKENS, len(TOKENS) + 6)
        link.freeze()
        call = stack.prefill.Prefill(timeout=60)
        start = prefill_pb2.PrefillStart(request_id="left", token_ids=TOKENS, sampling=pack_sampling(GREEDY))
        await call.write(prefill_pb2.PrefillRequest(start=start))
        await call.write(prefill_pb2.PrefillRequest(attach=prefill_pb2.PrefillAttach(ticket=ticket)))
        async with asyncio.timeout(30.0):
            await begun.wait()
            await call.write(prefill_pb2.PrefillRequest(cancel=prefill_pb2.PrefillCancel()))
            await until(lambda: not worker.live, within_s=10.0)
            if not lost:
                link.thaw()
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                async for _ in call:
                    pass
        assert isinstance(from_rpc(ended.value), DeadlineExceeded if lost else Cancelled)
        assert not worker.unfinished
        link.thaw()
        await stack.release(ticket, UNKNOWN if lost else FINISHED)


async def test_a_prefill_that_gets_no_ticket_gives_up(model: Path) -> None:
    async with worker_stack(model, kvstore=False, prefill={"ticket_wait_s": 0.2}) as stack:
        with pytest.raises(DeadlineExceeded, match="ticket"):
            async for _ in stack.progress("left", TOKENS, GREEDY, None):
                pass
        await stack.idle()


async def test_prefill_refuses_more_than_it_may_queue(model: Path) -> None:
    async with worker_stack(model, kvstore=False, prefill={"max_waiting": 1, "max_sequences": 1}) as stack:
        outcomes = await asyncio.gather(
            *(progress_to_end(stack, f"burst-{number}") for number in range(6)), return_exceptions=True
        )
        refused = [outcome for outcome in outcomes if isinstance(outcome, Exhausted)]
        assert len(refused) >= 4 and all(error.retry_after_s for error in refused)
        await stack.idle()


async def progress_to_end(stack: Stack, request_id: str) -> None:
    ticket = await stack.reserve(request_id, TOKENS, len(TOKENS) + 6)
    try:
        await stack.prefilled(request_id, TOKENS, GREEDY, ticket)
    finally:
        await stack.release(ticket, FINISHED)


async def test_bad_requests_are_refused_before_any_work(model: Path) -> None:
    async with worker_stack(model, kvstore=False) as stack:
        before = (await stack.stats("prefill")).computed_tokens
        for tokens, sampling in (
            ([], GREEDY),
            ([9999], GREEDY),
            ([5] * 3000, GREEDY),
            (TOKENS, SamplingParams(temperature=float("nan"))),
        ):
            with pytest.raises(InvalidArgument) as caught:
                async for _ in stack.progress("bad", tokens, sampling, None):
                    pass
            assert caught.value.field and caught.value.fix
        await stack.idle()
        assert (await stack.stats("prefill")).computed_tokens == before
