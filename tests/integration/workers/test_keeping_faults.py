"""What workers keep in a kvstore while it is frozen, dead or damaging: held for a while, served never, and freed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest

from engine.sampling.params import SamplingParams
from fabric.discovery import MemberInfo, open_discovery
from protos.deepinfer.v1 import kvstore_pb2 as pb
from protos.deepinfer.v1 import kvstore_pb2_grpc as rpc
from tests.support import frontstack, procs
from tests.support.oracle import Oracle
from tests.support.remote import process_id
from tests.support.stack import Stack, worker_stack

PROMPT = [3 + index % 400 for index in range(300)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
TURN = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


@asynccontextmanager
async def remote_store(model: Path, log_dir: Path, **workers: Any) -> AsyncIterator[tuple[Stack, procs.Process]]:
    """Workers whose kvstore is a child that they know the process of."""
    options = ("--discovery", "memory://child", "--index", "memory://", "--transport", "tcp://127.0.0.1:0")
    discovery = f"memory://{uuid4().hex}"
    both = {"discovery": discovery, "kvstore": True, **workers}
    prefill = {**both, "kvstore_timeout_s": 1.0}
    with procs.service("kvstore", log_dir, *options) as (child, ready):
        async with grpc.aio.insecure_channel(ready["address"]) as channel:
            info = await rpc.KvStoreServiceStub(channel).Info(pb.KvStoreServiceInfoRequest())
        member = MemberInfo("kvstore", info.instance, ready["address"], info.epoch, process=process_id(child.pid))
        async with (
            worker_stack(model, transport="tcp://127.0.0.1:0", kvstore=False, prefill=prefill, decode=both) as stack,
            open_discovery(discovery).register(member),
        ):
            yield stack, child


def metric(stack: Stack, role: str, name: str, **labels: str) -> float:
    registry = stack.running[role].servicer.core.metrics.registry
    return registry.get_sample_value(f"deepinfer_{role}_{name}", labels) or 0.0


async def until(condition: Callable[[], bool | Awaitable[bool]], within_s: float) -> float:
    """Seconds until the condition holds. Raises TimeoutError."""
    began = time.monotonic()
    await frontstack.until(condition, within_s)
    return time.monotonic() - began


@pytest.mark.slow
async def test_a_landing_returns_once_the_kvstore_that_may_still_write_is_proven_dead(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async with remote_store(model, tmp_path) as (stack, child):
        await stack.ask(PROMPT, GREEDY)
        await stack.idle()
        await stack.restart("prefill")
        loader = stack.running["prefill"].servicer.worker._tools.loader
        landings, doubts, get = loader._intake._pool, loader._doubts, loader._get

        async def frozen(*arguments: Any) -> Any:
            child.freeze()  # it knows the landing from here on, or will once it wakes up
            return await get(*arguments)

        loader._get = frozen
        answer = await stack.ask(PROMPT, GREEDY)
        assert answer.tokens == oracle.answer(PROMPT, GREEDY)
        assert landings.stats().quarantined > 0 and len(doubts) == 1
        for _ in range(20):
            doubts.sweep()
        assert landings.stats().quarantined > 0, "frozen is not dead"
        child.kill()
        took_s = await until(lambda: landings.stats().quarantined == 0, 10.0)
        assert took_s > 1.0, "what the dead had under way is waited for"
        assert landings.stats().retired == 0 and len(doubts) == 0


@pytest.mark.slow
async def test_a_frozen_kvstore_holds_offered_blocks_no_longer_than_their_deadline(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async with remote_store(model, tmp_path, store_hold_s=1.5) as (stack, child):
        expected = oracle.answer(PROMPT, TURN)  # before: it keeps the event loop
        child.freeze()
        answer = await stack.ask(PROMPT, TURN)
        held = await stack.stats("decode")
        assert held.offers == 1 and held.blocks_held > 0

        async def is_free() -> bool:
            return (await stack.stats("decode")).blocks_held == 0

        assert await until(is_free, 5.0) < 2.5
        await stack.idle()
        assert answer.tokens == expected
        failed = [metric(stack, "decode", "store_offers_total", result=end) for end in ("deadline_exceeded", "timeout")]
        assert sum(failed) == 1
        await stack.ask(PROMPT[1:], TURN)
        await until(lambda: metric(stack, "decode", "store_offers_total", result="absent") == 1, 10.0)


@pytest.mark.slow
async def test_a_drain_waits_for_what_is_offered_and_not_beyond_its_deadline(model: Path, tmp_path: Path) -> None:
    async with remote_store(model, tmp_path, store_hold_s=1.5, drain_s=10.0) as (stack, child):
        child.freeze()
        await stack.ask(PROMPT, TURN)
        assert (await stack.stats("decode")).offers == 1
        began = time.monotonic()
        await stack.running["decode"].chassis.drain()
        assert len(stack.engine("decode").offers) == 0, "its thread has ended"
        assert time.monotonic() - began < 6.0


@pytest.mark.parametrize("record", [0, 1, 2])
async def test_what_arrives_flipped_from_decode_is_rejected_counted_and_never_served(
    model: Path, oracle: Oracle, record: int
) -> None:
    prompt = PROMPT[:200]
    async with worker_stack(model) as stack:
        store = stack.running["kvstore"].servicer.store
        commit = store.commit

        async def damaging(session: Any, records: Any) -> Any:
            granted = session._granted
            if len(granted.wanted) == 3:  # decode's: two blocks and an anchor
                store._landings._memory[granted.landing.offset + granted.offsets[record] + 5] ^= 1
            return await commit(session, records)

        store.commit = damaging
        first = await stack.ask(prompt, TURN)
        await stack.idle()
        assert metric(stack, "decode", "store_records_total", result="rejected") == 1
        assert metric(stack, "decode", "store_records_total", result="stored") == record
        store.commit = commit
        for role in ("prefill", "decode"):
            await stack.restart(role)
        spoken = [*prompt, *first.tokens, 7, 8, 9]
        second = await stack.ask(spoken, GREEDY)
        assert second.tokens == oracle.answer(spoken, GREEDY)
        assert second.done is not None and second.done.usage.cached_tokens == 128, "up to prefill's own anchor"
