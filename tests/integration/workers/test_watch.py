"""Watch tells how busy a worker is and which blocks it holds, without a backlog."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from engine.prefix import PrefixIdentity, block_keys
from engine.sampling.params import SamplingParams
from protos.deepinfer.v1 import decode_pb2, prefill_pb2
from services.worker import status as worker_status
from tests.support import engines
from tests.support.stack import Stack, worker_stack

TOKENS = [3 + index % 400 for index in range(300)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


def keys_of(stack: Stack) -> set[bytes]:
    model = stack.engine("prefill").model
    layout = model.layout
    identity = PrefixIdentity(model.revision, layout.fingerprint, "exact", layout.block_tokens)
    return set(block_keys(b"tenant", TOKENS, identity))


async def test_a_watcher_learns_which_blocks_came(model: Path) -> None:
    async with worker_stack(model, kvstore=False) as stack:
        watch = stack.prefill.Watch(prefill_pb2.PrefillServiceWatchRequest(), timeout=30)
        first = (await watch.read()).status
        assert first.keys_reset and not first.keys_added
        held: set[bytes] = set()
        sequence, version = first.sequence, first.keys_version
        await stack.ask(TOKENS, GREEDY)
        while held != keys_of(stack):
            status = (await watch.read()).status
            assert status.sequence > sequence and not status.keys_reset and status.keys_base == version
            sequence, version = status.sequence, status.keys_version
            held = (held - set(status.keys_removed)) | set(status.keys_added)
        watch.cancel()


async def test_a_late_watcher_gets_the_whole_set_at_once(model: Path) -> None:
    async with worker_stack(model, kvstore=False) as stack:
        await stack.ask(TOKENS, GREEDY)
        await stack.running["prefill"].servicer.worker.board.observe()
        watch = stack.prefill.Watch(prefill_pb2.PrefillServiceWatchRequest(), timeout=30)
        status = (await watch.read()).status
        assert status.keys_reset and set(status.keys_added) == keys_of(stack)
        watch.cancel()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_drains_says_so_to_its_watchers(model: Path, role: str) -> None:
    requests = {"prefill": prefill_pb2.PrefillServiceWatchRequest, "decode": decode_pb2.DecodeServiceWatchRequest}
    async with worker_stack(model, kvstore=False) as stack:
        watch = getattr(stack, role).Watch(requests[role](), timeout=30)
        assert not (await watch.read()).status.draining
        draining = asyncio.create_task(stack.running[role].chassis.drain())
        while not (await watch.read()).status.draining:
            pass
        assert not draining.done()  # heard before the worker is gone
        watch.cancel()
        await draining


async def test_a_watcher_hears_of_an_idle_worker_that_nothing_changed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_status, "BEAT_S", 0.05)
    async with worker_stack(model, kvstore=False) as stack:
        watch = stack.prefill.Watch(prefill_pb2.PrefillServiceWatchRequest(), timeout=30)
        first, again = (await watch.read()).status, (await watch.read()).status
        assert (again.sequence, again.keys_version) == (first.sequence, first.keys_version)
        assert again.keys_base == again.keys_version and not (again.keys_reset or again.keys_added)
        watch.cancel()


async def test_a_look_that_nobody_waited_for_leads_to_the_whole_set(model: Path) -> None:
    async with worker_stack(model, kvstore=False) as stack:
        board = stack.running["prefill"].servicer.worker.board
        await stack.ask(TOKENS, GREEDY)
        runner = engines.runner_of(stack.servicer("prefill"))
        await runner.call(runner.engine.memory.index.journal.take)
        await stack.ask([*TOKENS, *TOKENS], GREEDY)
        await board.observe()
        watch = stack.prefill.Watch(prefill_pb2.PrefillServiceWatchRequest(), timeout=30)
        held = set((await watch.read()).status.keys_added)
        assert held == await engines.keys_of(stack.servicer("prefill")) > keys_of(stack)
        watch.cancel()


async def test_watchers_are_bounded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_status, "MAX_WATCHERS", 1)
    async with worker_stack(model, kvstore=False) as stack:
        first = stack.prefill.Watch(prefill_pb2.PrefillServiceWatchRequest(), timeout=30)
        await first.read()
        second = stack.prefill.Watch(prefill_pb2.PrefillServiceWatchRequest(), timeout=30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await second.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()
