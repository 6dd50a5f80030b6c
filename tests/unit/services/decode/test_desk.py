"""A desk over a real engine: what one attempt of a request does to the next, and handoffs of nothing."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from engine.config import EngineConfig
from engine.engine import Engine
from engine.layout import CacheGroup, GroupKind, Layout
from engine.model import ModelInfo
from engine.runner import EngineRunner
from engine.sampling.params import SamplingParams, SamplingState
from fabric.deaths import Deaths, Incarnation
from fabric.errors import InvalidArgument, StaleTicket
from fabric.kvlink import Notice
from fabric.kvlink.credit import Run
from fabric.kvlink.extents import Extents
from fabric.kvlink.inproc import InprocLink
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.messages import Alive, Chunk, GaveUp
from fabric.kvlink.slabs import SlabState
from fabric.kvlink.verify import digest
from fabric.telemetry.metrics import Metrics
from services.decode.desk import Desk, Holding, Limits, ReserveAsk
from services.decode.generation import Batch, End, GenerateAsk, generate
from services.decode.telemetry import DecodeMetrics
from services.decode.tickets import TicketBook, WriterState
from services.decode.wake import Wake
from services.worker.doubts import LINGER_S
from services.worker.pairing import Records
from services.worker.receipts import Receipt
from tests.support.fakefamily import BLOCK_TOKENS, VOCAB, fake_engine

EPOCH = 7
WRITER = Incarnation("prefill-1", 1)
PROMPT = tuple(range(2, 2 + 2 * BLOCK_TOKENS))


class Bench:
    """One decode worker without its server, and an honest writer into its landings."""

    def __init__(
        self, engine: Engine, runner: EngineRunner, link: InprocLink, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.engine, self.runner = engine, runner
        self.landings = LandingPool(link, 64 << 10, slab_bytes=64)
        book = TicketBook(EPOCH, 30.0, 6, time.monotonic)
        numbers = itertools.count()
        metrics, wake = DecodeMetrics(Metrics("decode")), Wake(Deaths(lambda _: False), clock)
        mint: Callable[[], str] = lambda: f"t{next(numbers)}"  # noqa: E731
        self.desk = Desk(runner, link, self.landings, book, mint, metrics, Limits(4096), wake)

    async def reserve(self, request_id: str, *, cache: bool = False) -> Holding:
        model = self.engine.model
        records = Records(model.revision, model.layout)
        ask = ReserveAsk(request_id, PROMPT, len(PROMPT) + 8, b"", cache, records, WRITER, EPOCH)
        return await self.desk.reserve(ask)

    def write(self, holding: Holding) -> Receipt:
        """Everything that the handoff needs, as one chunk that the desk hears of; the receipt for it."""
        size, start = holding.handoff.landing_bytes, holding.landing.offset
        values = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        self.landings._memory[start : start + size] = values
        extents = tuple(p.sealed(digest(values[p.offset : p.offset + p.size])) for p in holding.handoff.places())
        rows = tuple((e.group, e.block, e.valid_entries, e.offset, e.size, e.digest) for e in extents)
        chunk = Chunk(holding.ticket_id, 0, Run(0, 0, size), True, Extents.of(rows))
        self.desk.noticed(Notice(WRITER.instance, WRITER.epoch, chunk.pack()))
        model, ask = self.engine.model, holding.ask
        names = (holding.ticket_id, ask.request_id, EPOCH, model.revision, model.layout.fingerprint)
        return Receipt(*names, len(ask.tokens), extents, 3, SamplingState(1, 1))

    async def generate(self, receipt: Receipt, emit: Callable[[Batch | End], object], gather_s: float = 0.0) -> None:
        sampling = SamplingParams(max_tokens=3, ignore_eos=True)
        ask = GenerateAsk(receipt.ticket_id, receipt.request_id, PROMPT, sampling, receipt, 0, gather_s)

        async def told(output: Batch | End) -> None:
            waits = emit(output)
            if asyncio.isfuture(waits):
                await waits

        async with self.desk.serving(receipt.ticket_id, receipt.request_id, EPOCH) as holding:
            await generate(self.runner, self.desk, holding, ask, told)


@asynccontextmanager
async def bench_of(engine: Engine, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Bench]:
    link, runner = InprocLink("decode-desk", EPOCH), EngineRunner(engine)
    bench = Bench(engine, runner, link, clock)
    yield bench
    await bench.desk.close()
    await runner.close()
    await link.close()


async def test_an_attempt_that_was_released_neither_decodes_from_nor_frees_what_the_next_one_of_its_name_reserved():
    async with bench_of(fake_engine(num_blocks=16, num_slots=8)) as bench:
        told: list[Batch | End] = []
        begun, client_reads = asyncio.Event(), asyncio.get_running_loop().create_future()

        def first_token(output: Batch | End) -> asyncio.Future[None]:
            told.append(output)
            begun.set()
            return client_reads

        first = await bench.reserve("r")
        running = asyncio.create_task(bench.generate(bench.write(first), first_token))
        await begun.wait()
        assert bench.desk.release(first.ticket_id, WriterState.FINISHED)
        second = await bench.reserve("r")  # nothing is written for it yet
        client_reads.set_result(None)
        with pytest.raises(StaleTicket):
            await running
        assert len(told) == 1
        held = await bench.runner.call(bench.engine.held, second.ticket_id)
        assert (held.block_table, held.slot) == (second.reservation.blocks, second.reservation.slot)
        outputs: list[Batch | End] = []
        await bench.generate(bench.write(second), outputs.append)
        assert isinstance(outputs[-1], End)
        assert (await bench.runner.call(bench.engine.stats)).blocks_held == 0


@pytest.mark.parametrize("confirmed", [True, False])
async def test_memory_of_a_writer_that_was_heard_is_nobody_elses_by_the_gateways_word_alone(confirmed: bool):
    """Its own word frees it at once; without one it is in doubt for as long as its bytes may still be on their way."""
    now = [0.0]
    async with bench_of(fake_engine(num_blocks=16, num_slots=8), lambda: now[0]) as bench:
        first = await bench.reserve("r")
        bench.desk.noticed(Notice(WRITER.instance, WRITER.epoch, Alive(first.ticket_id).pack()))
        assert bench.desk.release(first.ticket_id, WriterState.FINISHED)
        assert bench.landings.state(first.ticket_id) is SlabState.QUARANTINED
        assert (await bench.reserve("s")).landing.offset != first.landing.offset
        if confirmed:
            bench.desk.noticed(Notice(WRITER.instance, WRITER.epoch, GaveUp(first.ticket_id).pack()))
        else:
            for part in (0.0, 0.4, 0.8, 0.99):
                now[0] = part * LINGER_S
                bench.desk.sweep()
                assert bench.landings.state(first.ticket_id) is SlabState.QUARANTINED
            now[0] = LINGER_S
            bench.desk.sweep()
        assert bench.landings.state(first.ticket_id) is SlabState.FREE
        assert (await bench.reserve("t")).landing.offset == first.landing.offset


async def test_portions_that_are_too_far_apart_are_refused_before_anything_is_verified():
    async with bench_of(fake_engine(num_blocks=16, num_slots=8)) as bench:
        holding, told = await bench.reserve("r"), list[Batch | End]()
        receipt = bench.write(holding)
        with pytest.raises(InvalidArgument) as refused:
            await bench.generate(receipt, told.append, gather_s=1.5)
        assert refused.value.field == "gather_ms" and not told


async def test_tokens_in_portions_are_the_same_tokens():
    async with bench_of(fake_engine(num_blocks=16, num_slots=8)) as bench:
        answers = []
        for name, gather_s in (("each", 0.0), ("portions", 0.5)):
            told = list[Batch | End]()
            await bench.generate(bench.write(await bench.reserve(name)), told.append, gather_s)
            batches = [output for output in told if isinstance(output, Batch)]
            tokens = [token for batch in batches for token in batch.token_ids]
            sizes = [len(batch.token_ids) for batch in batches]
            assert [batch.first_index for batch in batches] == [0, *itertools.accumulate(sizes[:-1])]
            assert isinstance(told[-1], End)
            answers.append(tokens)
        assert answers[0] == answers[1] and len(answers[0]) == 3


@pytest.mark.parametrize("released", [False, True])
async def test_blocks_that_a_chunk_is_being_copied_into_stay_reserved_until_the_copy_has_ended(released: bool):
    async with bench_of(fake_engine(num_blocks=16, num_slots=8)) as bench:
        copy, copying, go_on = bench.landings._copy, threading.Event(), threading.Event()

        def slow_copy(*rows: Any) -> int | None:
            copying.set()
            assert go_on.wait(10.0)
            return copy(*rows)

        bench.landings._copy, bench.landings.inline_bytes = slow_copy, 0  # type: ignore[assignment]
        holding = await bench.reserve("r")
        bench.write(holding)
        assert await asyncio.to_thread(copying.wait, 10.0)
        if released:
            assert bench.desk.release(holding.ticket_id, WriterState.FINISHED)
        ending = asyncio.create_task(bench.desk.close())
        await asyncio.sleep(0)
        assert (await bench.runner.call(bench.engine.stats)).reserved == 1
        assert bench.landings.state(holding.ticket_id) is SlabState.GRANTED
        assert not ending.done()
        go_on.set()
        await ending
        if released:
            assert (await bench.runner.call(bench.engine.stats)).blocks_held == 0
            assert bench.landings.state(holding.ticket_id) is SlabState.FREE


class Constant:
    """A family without window groups whose every logit is the same."""

    layout = Layout(
        BLOCK_TOKENS, 0, (CacheGroup("entry", GroupKind.GLOBAL, 1, BLOCK_TOKENS, 1, 8, "float32", "fake-1"),)
    )

    def forward(self, batch: RaggedBatch, cache: CachePool) -> torch.Tensor:
        return torch.zeros(len(batch.logit_rows), VOCAB)


async def test_a_prompt_that_decode_holds_to_its_last_block_is_handed_over_with_nothing_written():
    layout = Constant.layout
    model = ModelInfo("constant", "revision-1", "constant", VOCAB, 4096, (1,), layout)
    config = EngineConfig(Path("constant"), max_batch_tokens=16, max_sequences=8)
    engine = Engine(Constant(), CachePool(layout, 16, 4, torch.float32), model, config)
    async with bench_of(engine) as bench:
        outputs: list[Batch | End] = []
        for held_tokens in (0, len(PROMPT)):
            holding = await bench.reserve("r", cache=True)
            assert holding.reservation.held_tokens == held_tokens
            await bench.generate(bench.write(holding), outputs.append)
            assert isinstance(outputs[-1], End)
        assert holding.handoff.landing_bytes == 0
