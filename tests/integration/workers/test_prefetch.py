"""A hint before the next turn: the session's blocks are in memory when it comes, and the disk is not waited for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.sampling.params import SamplingParams
from fabric.channels import call
from fabric.errors import InvalidArgument
from protos.deepinfer.v1 import prefill_pb2
from tests.support.oracle import Oracle
from tests.support.stack import Stack, worker_stack

TURN = [3 + index % 400 for index in range(700)]
NEXT_TURN = [*TURN, *(5 + index % 300 for index in range(60))]
WHOLE = (len(TURN) - 1) // 128 * 128
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def store(stack: Stack) -> Any:
    return stack.running["kvstore"].servicer.store


async def hinted(stack: Stack, tokens: list[int], salt: bytes = b"tenant") -> tuple[int, int]:
    """Tokens held and rising."""
    request = prefill_pb2.PrefillServicePrefetchRequest(token_ids=tokens, salt=salt)
    reply = await call(stack.prefill.Prefetch, request)
    return reply.held_tokens, reply.rising_tokens


async def on_disk_alone(stack: Stack) -> None:
    """A turn was answered long ago: no worker has its blocks, and no memory."""
    await stack.ask(TURN, GREEDY)
    await stack.idle()
    async with asyncio.timeout(10.0):
        while not len(store(stack).tier):  # noqa: ASYNC110 - a put tells nobody here that it ended
            await asyncio.sleep(0.005)
        await store(stack).tiers.nvme.drained()
    records = len(store(stack).tiers.nvme)
    await stack.restart("kvstore")
    async with asyncio.timeout(10.0):
        while len(store(stack).tiers.nvme) < records:  # noqa: ASYNC110 - nor does recovery
            await asyncio.sleep(0.005)
    await stack.restart("prefill")
    assert len(store(stack).tier) == 0 < records


def reads_of(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records of each read of the disk from now on."""
    nvme, reads = store(stack).tiers.nvme, []
    fetch = nvme.fetch

    async def counted(wanted: Any) -> Any:
        reads.append(len(wanted))
        return await fetch(wanted)

    monkeypatch.setattr(nvme, "fetch", counted)
    return reads


async def test_after_the_hint_the_turn_reads_no_disk(
    model: Path, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker_stack(model, store={"nvme_dir": tmp_path}) as stack:
        await on_disk_alone(stack)
        assert await hinted(stack, NEXT_TURN) == (WHOLE, WHOLE)
        async with asyncio.timeout(10.0):
            await store(stack)._prefetcher.settled()
        reads = reads_of(stack, monkeypatch)
        answer = await stack.ask(NEXT_TURN, GREEDY)
        assert answer.tokens == oracle.answer(NEXT_TURN, GREEDY) and answer.done is not None
        assert answer.done.usage.cached_tokens == WHOLE
        assert reads == []
        assert await hinted(stack, NEXT_TURN) == (WHOLE, 0)


async def test_without_the_hint_it_reads_the_disk(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker_stack(model, store={"nvme_dir": tmp_path}) as stack:
        await on_disk_alone(stack)
        reads = reads_of(stack, monkeypatch)
        await stack.ask(NEXT_TURN, GREEDY)
        assert sum(reads) > WHOLE // 128  # the blocks and their anchor


async def test_a_hint_of_another_tenant_brings_nothing_up(model: Path, tmp_path: Path) -> None:
    async with worker_stack(model, store={"nvme_dir": tmp_path}) as stack:
        await on_disk_alone(stack)
        assert await hinted(stack, NEXT_TURN, salt=b"other") == (0, 0)
        assert len(store(stack).tier) == 0


async def test_a_hint_without_a_store_is_no_error(model: Path) -> None:
    async with worker_stack(model, kvstore=False) as stack:
        assert await hinted(stack, TURN) == (0, 0)
        await stack.ask(TURN, GREEDY)
        assert await hinted(stack, NEXT_TURN) == (WHOLE, 0)


async def test_what_is_no_prompt_is_refused(model: Path) -> None:
    async with worker_stack(model, kvstore=False) as stack:
        for tokens in ([], [1 << 30], [3] * 1_000_000):
            with pytest.raises(InvalidArgument):
                await hinted(stack, tokens)
