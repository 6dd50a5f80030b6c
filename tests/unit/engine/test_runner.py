"""The engine thread and its asyncio face."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

import pytest

from engine.batch import RaggedBatch
from engine.engine import Engine
from engine.errors import (
    CallTimeout,
    DuplicateRequest,
    EngineStopped,
    Exhausted,
    IntegrityBroken,
    InvalidParameter,
    UnknownRequest,
)
from engine.events import Failed, Finished, FirstToken, TokensOut
from engine.requests import DecodeRequest, GenerateRequest, PrefillRequest
from engine.runner import EngineRunner, RunnerLimits, Step
from engine.sampling.params import SamplingParams
from engine.stops import FinishReason
from tests.support.driving import GREEDY, copy_kv, tokens_of, whole
from tests.support.fakefamily import fake_engine

PROMPT = tuple(range(2, 30))
DEFAULT = RunnerLimits()


@asynccontextmanager
async def running(engine: Engine, limits: RunnerLimits = DEFAULT) -> AsyncIterator[EngineRunner]:
    runner = EngineRunner(engine, limits)
    try:
        yield runner
    finally:
        await runner.close()


async def until(runner: EngineRunner, condition: Callable[[Engine], bool]) -> None:
    """Wait until `condition` holds on the engine thread."""
    async with asyncio.timeout(10):
        reached = False
        while not reached:  # each call waits for the step in progress
            reached = await runner.call(lambda: condition(runner.engine))


class Gate:
    """Stops the engine thread inside a forward pass until opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, batch: RaggedBatch) -> None:
        self.entered.set()
        assert self.opened.wait(10)


async def test_requests_stream_side_by_side_and_leave_nothing() -> None:
    async with running(fake_engine()) as runner:

        async def one(index: int) -> list[int]:
            async with runner.running(GenerateRequest(f"r{index}", PROMPT[index:], GREEDY)) as events:
                return tokens_of([event async for event in events], f"r{index}")

        streams = await asyncio.gather(*(one(index) for index in range(6)))
        assert streams == [whole(fake_engine(), PROMPT[index:]) for index in range(6)]
        await runner.call(runner.engine.memory.check_idle)
        assert runner.steps > 0 and runner.healthy and not runner._mailboxes


async def test_errors_reach_the_caller_with_their_type() -> None:
    async with running(fake_engine()) as runner:
        with pytest.raises(InvalidParameter):
            await runner.submit(GenerateRequest("r", (), GREEDY))
        with pytest.raises(UnknownRequest):
            await anext(runner.events("r"))
        await runner.submit(GenerateRequest("r", PROMPT, GREEDY))
        with pytest.raises(DuplicateRequest):
            await runner.submit(GenerateRequest("r", PROMPT, GREEDY))
        with pytest.raises(ZeroDivisionError):
            await runner.call(lambda: 1 // 0)
        assert len(tokens_of([event async for event in runner.events("r")], "r")) == 12


async def test_a_reader_that_leaves_cancels_its_request() -> None:
    async with running(fake_engine()) as runner:
        async with runner.running(
            GenerateRequest("r", PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
        ) as events:
            await anext(events)
        await until(runner, lambda engine: not engine.has_work)
        await runner.call(runner.engine.memory.check_idle)
        assert not runner._mailboxes


async def test_a_cancel_ends_the_stream_with_finished() -> None:
    async with running(fake_engine()) as runner:
        await runner.submit(GenerateRequest("r", PROMPT, SamplingParams(max_tokens=400, ignore_eos=True)))
        events = runner.events("r")
        await anext(events)
        runner.cancel("r")
        last = [event async for event in events][-1]
        assert isinstance(last, Finished) and last.reason is FinishReason.CANCELLED


async def test_a_release_ends_a_stream_that_still_waits() -> None:
    gate = Gate()
    async with running(fake_engine(spy=gate)) as runner:
        await runner.submit(GenerateRequest("r", PROMPT, GREEDY))
        waiting = asyncio.ensure_future(anext(runner.events("r")))
        await asyncio.sleep(0)
        runner.release("r")
        gate.opened.set()
        event = await waiting
        assert isinstance(event, Failed) and isinstance(event.error, UnknownRequest)


async def test_a_slow_reader_pauses_itself_and_nobody_else_and_loses_nothing() -> None:
    long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    async with running(fake_engine(), RunnerLimits(events=4)) as runner:
        await runner.submit(GenerateRequest("slow", PROMPT, long))
        async with runner.running(GenerateRequest("fast", PROMPT[5:], long)) as events:
            fast = [event async for event in events]
        assert tokens_of(fast, "fast") == whole(fake_engine(), PROMPT[5:], long)
        await until(runner, lambda engine: not engine.has_work)
        unread = runner._mailboxes["slow"]
        assert unread.paused and len(unread._events) < 12
        slow = [event async for event in runner.events("slow")]
        assert tokens_of(slow, "slow") == whole(fake_engine(), PROMPT, long)
        assert max(len(event.token_ids) for event in slow if isinstance(event, TokensOut)) > 1, (
            "piled-up tokens come as one"
        )


async def test_a_call_past_its_deadline_never_runs() -> None:
    gate, ran = Gate(), []
    async with running(fake_engine(spy=gate)) as runner:
        await runner.submit(GenerateRequest("r", PROMPT, GREEDY))
        await asyncio.to_thread(gate.entered.wait, 10)
        with pytest.raises(CallTimeout):
            await runner.call(lambda: ran.append("late"), timeout_s=0.01)
        with pytest.raises(CallTimeout):
            await runner.reserve("late", 8, 20, timeout_s=0.01)
        gate.opened.set()
        await until(runner, lambda engine: not engine.has_work)
        assert ran == [] and (await runner.call(runner.engine.stats)).reserved == 0


@pytest.mark.parametrize("what", ["reserve", "load"])
async def test_memory_taken_for_a_caller_that_gave_up_comes_back(what: str) -> None:
    engine = fake_engine()
    inside, go_on = threading.Event(), threading.Event()
    take = engine.memory.take

    def slow_take(blocks: int, slots: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        inside.set()
        assert go_on.wait(10)
        return take(blocks, slots)

    engine.memory.take = slow_take  # type: ignore[method-assign]
    async with running(engine) as runner:
        acquire = runner.reserve("r", 8, 20) if what == "reserve" else runner.begin_load(PROMPT, b"", 0, 2)
        caller = asyncio.ensure_future(acquire)
        await asyncio.to_thread(inside.wait, 10)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        go_on.set()
        await runner.call(engine.memory.check_idle)
        assert engine.stats().reserved == engine.stats().loading == 0


@pytest.mark.parametrize("seed", [1, 2])
async def test_after_a_storm_of_leavers_nothing_is_held_and_the_others_got_their_tokens(seed: int) -> None:
    draw = Random(seed)
    params = SamplingParams(temperature=1.0, max_tokens=15, ignore_eos=True, seed=3)
    lengths = [draw.randrange(1, len(PROMPT)) for _ in range(60)]
    leaves_after = [draw.randrange(0, 6) if draw.random() < 0.4 else None for _ in range(60)]
    expected = {length: whole(fake_engine(), PROMPT[:length], params) for length in set(lengths)}

    async def one(runner: EngineRunner, index: int) -> None:
        received = []
        async with runner.running(GenerateRequest(f"r{index}", PROMPT[: lengths[index]], params)) as events:
            async for event in events:
                if leaves_after[index] is not None and len(received) >= leaves_after[index]:
                    return
                received.append(event)
        assert tokens_of(received, f"r{index}") == expected[lengths[index]]

    async with running(fake_engine(num_blocks=14, num_slots=6)) as runner:
        await asyncio.gather(*(one(runner, index) for index in range(60)))
        await runner.call(runner.engine.memory.check_idle)
        stats = await runner.call(runner.engine.stats)
        assert stats.blocks_held == stats.slots_held == stats.waiting == stats.running == 0
        assert not runner._mailboxes and not runner._calls


async def test_too_many_waiting_calls_are_refused() -> None:
    gate = Gate()
    async with running(fake_engine(spy=gate), RunnerLimits(calls=2)) as runner:
        await runner.submit(GenerateRequest("r", PROMPT, GREEDY))
        await asyncio.to_thread(gate.entered.wait, 10)
        queued = [asyncio.ensure_future(runner.call(lambda: None)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Exhausted):
            await runner.call(lambda: None)
        gate.opened.set()
        await asyncio.gather(*queued)


async def test_a_dead_engine_thread_fails_every_request_and_turns_health_off() -> None:
    async with running(fake_engine()) as runner:
        await runner.submit(GenerateRequest("r", PROMPT, SamplingParams(max_tokens=400, ignore_eos=True)))
        await runner.reserve("kept", 8, 20)

        def broken() -> None:
            raise IntegrityBroken("two owners for block 7")

        with pytest.raises(EngineStopped):
            await runner.call(broken)
        events = [event async for event in runner.events("r")]
        assert isinstance(events[-1], Failed) and isinstance(events[-1].error, EngineStopped)
        assert "block 7" in str(events[-1].error) and isinstance(runner.fatal, IntegrityBroken)
        assert not runner.healthy
        with pytest.raises(EngineStopped):
            await runner.submit(GenerateRequest("s", PROMPT, GREEDY))
        runner.cancel("r")


async def test_a_step_that_raises_is_fatal_too() -> None:
    engine = fake_engine()

    def broken() -> None:
        raise RuntimeError("defect")

    async with running(engine) as runner:
        engine.step = broken  # type: ignore[method-assign, assignment]
        with pytest.raises(EngineStopped):
            async with runner.running(GenerateRequest("r", PROMPT, GREEDY)) as events:
                failed = await anext(events)
                assert isinstance(failed, Failed)
                raise failed.error
        assert isinstance(runner.fatal, RuntimeError) and not runner.healthy


async def test_close_fails_what_is_left_and_may_be_repeated() -> None:
    runner = EngineRunner(fake_engine())
    await runner.submit(GenerateRequest("r", PROMPT, SamplingParams(max_tokens=400, ignore_eos=True)))
    await runner.close()
    await runner.close()
    last = [event async for event in runner.events("r")][-1]
    assert isinstance(last, Failed) and isinstance(last.error, EngineStopped)


async def test_prefill_holds_and_decode_continues_across_two_runners() -> None:
    async with running(fake_engine()) as source, running(fake_engine()) as target:
        reservation = await target.reserve("r", len(PROMPT), 60, b"", PROMPT)
        async with source.running(PrefillRequest("r", PROMPT, GREEDY)) as events:
            first = [event async for event in events][-1]
            assert isinstance(first, FirstToken) and first.held
            await source.call(copy_kv, source.engine, target.engine, "r", reservation)
        await source.call(source.engine.memory.check_idle)
        request = DecodeRequest("r", PROMPT, (first.token,), GREEDY, first.state)
        async with target.running(request) as events:
            rest = tokens_of([event async for event in events], "r")
        assert [first.token, *rest] == whole(fake_engine(), PROMPT)


async def test_a_blocked_queue_starts_moving_when_memory_is_released() -> None:
    async with running(fake_engine(num_blocks=6)) as runner:
        await runner.reserve("holder", 40, 48)
        await runner.submit(GenerateRequest("r", PROMPT[:20], GREEDY))
        await until(runner, lambda engine: engine.blocked)
        before = runner.steps
        runner.release("holder")
        assert len(tokens_of([event async for event in runner.events("r")], "r")) == 12
        assert runner.busy is False or runner.steps > before


async def test_every_computed_step_is_told_with_its_tokens() -> None:
    steps: list[Step] = []
    runner = EngineRunner(fake_engine(max_batch_tokens=9), observe=steps.append)
    try:
        async with runner.running(GenerateRequest("r", PROMPT, GREEDY)) as events:
            async for _ in events:
                pass
        computed = await runner.call(lambda: runner.engine.stats().computed_tokens)
    finally:
        await runner.close()
    assert [step.tokens for step in steps[:4]] == [8, 8, 8, 4]  # chunks end with blocks
    assert sum(step.tokens for step in steps) == computed
    assert all(step.seconds > 0 for step in steps)
