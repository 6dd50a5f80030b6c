"""The tier on disk end to end: what DRAM lost is a hit, what the disk spoilt is a miss, and answers stay the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.sampling.params import SamplingParams
from tests.support.oracle import Oracle
from tests.support.stack import Stack, worker_stack

TOKENS = [3 + index % 400 for index in range(700)]
WHOLE = (len(TOKENS) - 1) // 128 * 128
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


async def asked(stack: Stack, oracle: Oracle, tokens: list[int]) -> int:
    """Cached tokens of a request whose answer must be the oracle's, at a prefill worker that has nothing of its own."""
    await stack.restart("prefill")
    answer = await stack.ask(tokens, GREEDY)
    assert answer.tokens == oracle.answer(tokens, GREEDY)
    await stack.idle()
    assert answer.done is not None
    async with asyncio.timeout(10.0):
        await nvme(stack).drained()
    return int(answer.done.usage.cached_tokens)


def nvme(stack: Stack):
    return stack.running["kvstore"].servicer.store.tiers.nvme


def flip(folder: Path) -> None:
    """One bit of the only segment's payloads."""
    (segment,) = folder.glob("*.segment")
    damaged = bytearray(segment.read_bytes())
    damaged[len(damaged) // 3] ^= 1
    segment.write_bytes(bytes(damaged))


async def found(stack: Stack, records: int) -> None:
    async with asyncio.timeout(10.0):
        while len(nvme(stack)) < records:  # noqa: ASYNC110 - recovery announces it to nobody here
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("direct", [False, True])
async def test_a_store_that_starts_anew_serves_what_it_wrote(
    model: Path, oracle: Oracle, tmp_path: Path, direct: bool
) -> None:
    store = {"nvme_dir": tmp_path, "nvme_segment_mb": 1, "nvme_direct": direct}
    async with worker_stack(model, store=store) as stack:
        assert await asked(stack, oracle, TOKENS) == 0
        records = len(nvme(stack))
        assert records == len(stack.running["kvstore"].servicer.store.tier) > 0
        await stack.restart("kvstore")
        await found(stack, records)
        assert len(stack.running["kvstore"].servicer.store.tier) == 0
        assert await asked(stack, oracle, TOKENS) == WHOLE


async def test_more_prompts_than_dram_holds_are_all_hits(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    prompts = [[3 + (index * (7 + number)) % 400 for index in range(700)] for number in range(5)]
    store = {"nvme_dir": tmp_path, "nvme_segment_mb": 4, "memory_mb": 1, "landing_mb": 8, "nvme_queue_share": 0.75}
    async with worker_stack(model, store=store) as stack:
        for prompt in prompts:
            assert await asked(stack, oracle, prompt) == 0
        dram = stack.running["kvstore"].servicer.store.tier
        assert len(dram) < len(nvme(stack))
        for prompt in prompts:
            assert await asked(stack, oracle, prompt) == WHOLE
        assert nvme(stack).counts.damaged == 0  # what was written is what was sealed, though DRAM is used anew at once


async def test_a_flipped_byte_on_disk_is_a_counted_miss_and_is_written_anew(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async with worker_stack(model, store={"nvme_dir": tmp_path}) as stack:
        await asked(stack, oracle, TOKENS)
        await stack.stop("kvstore")
        await asyncio.to_thread(flip, tmp_path)
        await stack.restart("kvstore")
        async with asyncio.timeout(10.0):
            while not len(nvme(stack)):  # noqa: ASYNC110 - recovery announces it to nobody here
                await asyncio.sleep(0.005)
        assert await asked(stack, oracle, TOKENS) < WHOLE
        assert nvme(stack).counts.damaged == 1
        assert await asked(stack, oracle, TOKENS) == WHOLE
