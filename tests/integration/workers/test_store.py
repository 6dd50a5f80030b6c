"""The kvstore may miss and never lies; losing it, or its index, costs hits and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.sampling.params import SamplingParams
from fabric.channels import call
from fabric.records import Extent
from protos.deepinfer.v1 import common_pb2, kvstore_pb2
from services.worker import putter
from services.worker.items import Item, seal
from services.worker.regions import PoolRegions
from tests.support.oracle import Oracle
from tests.support.servers import redis_server
from tests.support.stack import Stack, worker_stack

TOKENS = [3 + index % 400 for index in range(700)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def metric(stack: Stack, role: str, name: str, **labels: str) -> float:
    servicer = stack.running[role].servicer
    metrics = servicer.core.metrics if role != "kvstore" else servicer.store._metrics._metrics
    return metrics.registry.get_sample_value(f"deepinfer_{name}", labels) or 0.0


async def warm(stack: Stack, oracle: Oracle) -> None:
    """One request whose blocks reach the store, then a prefill worker that has nothing of its own."""
    assert (await stack.ask(TOKENS, GREEDY)).tokens == oracle.answer(TOKENS, GREEDY)
    await stack.idle()
    assert len(stack.running["kvstore"].servicer.store.tier) > 0
    await stack.restart("prefill")


async def cached(stack: Stack, oracle: Oracle) -> int:
    """Cached tokens of the same request, whose answer must be the same."""
    answer = await stack.ask(TOKENS, GREEDY)
    assert answer.tokens == oracle.answer(TOKENS, GREEDY)
    await stack.idle()
    assert answer.done is not None
    return answer.done.usage.cached_tokens


@pytest.mark.parametrize("transport", ["inproc://", "tcp://127.0.0.1:0", "ucx://"])
async def test_a_new_prefill_hits_what_an_earlier_one_stored(model: Path, oracle: Oracle, transport: str) -> None:
    async with worker_stack(model, transport=transport) as stack:
        await warm(stack, oracle)
        assert await cached(stack, oracle) == (len(TOKENS) - 1) // 128 * 128
        assert metric(stack, "kvstore", "kvstore_hits_total") == 1


@pytest.mark.parametrize(("transport", "moved"), [("ucx://", False), ("ucx://?mapped=off", True)])
async def test_a_worker_of_the_same_host_reads_a_hit_where_it_lies(
    model: Path, oracle: Oracle, transport: str, moved: bool
) -> None:
    async with worker_stack(model, transport=transport) as stack:
        await warm(stack, oracle)
        assert await cached(stack, oracle) > 0
        landings = stack.running["prefill"].servicer.worker._tools.loader._intake._pool
        assert landings._memory.any() == moved  # nobody wrote into the landing that was granted
        assert landings.stats().committed_bytes_total > 0


async def test_without_a_kvstore_text_is_the_same_and_nothing_hits(model: Path, oracle: Oracle) -> None:
    async with worker_stack(model) as stack:
        await warm(stack, oracle)
        await stack.stop("kvstore")
        assert await cached(stack, oracle) == 0


async def test_a_damaged_record_is_a_counted_miss(model: Path, oracle: Oracle) -> None:
    async with worker_stack(model) as stack:
        await warm(stack, oracle)
        tier = stack.running["kvstore"].servicer.store.tier
        for record in list(tier._records.values()):
            tier.memory[record.offset + record.size // 2] ^= 1
        assert await cached(stack, oracle) == 0
        assert metric(stack, "kvstore", "kvstore_corrupt_total") >= 1
        assert metric(stack, "prefill", "prefill_store_misses_total", reason="data_loss") == 1
        # What was damaged is forgotten, and what was computed instead of it stored.
        assert len(tier) and all(tier.is_intact(record) for record in tier._records.values())


async def test_a_store_that_writes_wrong_bytes_is_caught_by_prefill(model: Path, oracle: Oracle) -> None:
    async with worker_stack(model) as stack:
        await warm(stack, oracle)
        tier = stack.running["kvstore"].servicer.store.tier
        tier.is_intact = lambda record: True  # a store whose own check does not see the damage
        for record in list(tier._records.values()):
            tier.memory[record.offset] ^= 1
        assert await cached(stack, oracle) == 0
        assert metric(stack, "prefill", "prefill_store_misses_total", reason="data_loss") == 1
        assert metric(stack, "prefill", "kv_transfer_digest_mismatch_total") == 1


async def test_a_writer_that_seals_wrong_digests_stores_nothing(
    model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(items: Sequence[Item], offsets: Sequence[int], regions: PoolRegions) -> list[list[Extent]]:
        return [
            [replace(extent, digest=extent.digest ^ 1) for extent in record] for record in seal(items, offsets, regions)
        ]

    async with worker_stack(model) as stack:
        monkeypatch.setattr(putter, "seal", wrong)
        await stack.ask(TOKENS, GREEDY)
        await stack.idle()
        assert len(stack.running["kvstore"].servicer.store.tier) == 0
        assert metric(stack, "kvstore", "kvstore_rejected_total") > 0
        assert metric(stack, "prefill", "prefill_store_records_total", result="rejected") > 0


async def test_requests_that_ask_for_no_cache_leave_and_use_none(model: Path, oracle: Oracle) -> None:
    async with worker_stack(model) as stack:
        for _ in range(2):
            answer = await stack.ask(TOKENS, GREEDY, use_cache=False)
            assert answer.tokens == oracle.answer(TOKENS, GREEDY)
            assert answer.done is not None and answer.done.usage.cached_tokens == 0
        await stack.idle()
        assert len(stack.running["kvstore"].servicer.store.tier) == 0


async def test_prompt_logprobs_compute_every_token_although_it_is_cached(model: Path) -> None:
    asked = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    async with worker_stack(model) as stack:
        await stack.ask(TOKENS, GREEDY)
        answer = await stack.ask(TOKENS, asked)
        assert answer.done is not None and answer.done.usage.cached_tokens == 0
        assert [logprob.token_id for logprob in answer.done.prompt_logprobs] == TOKENS[1:]


async def test_losing_redis_costs_no_request(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    with redis_server(tmp_path) as redis:
        async with worker_stack(model, store={"index": redis.url}) as stack:
            await warm(stack, oracle)
            redis.kill()
            assert await cached(stack, oracle) > 0


async def test_retained_records_are_counted_and_bounded(model: Path, oracle: Oracle) -> None:
    async with worker_stack(model) as stack:
        await warm(stack, oracle)
        tier = stack.running["kvstore"].servicer.store.tier
        keys = list({record.key for record in tier._records})
        size = max(record.size for record in tier._records.values())
        request = kvstore_pb2.RetainRequest(keys=keys, retention=common_pb2.RETENTION_CLASS_CHAT, budget_bytes=size)
        reply = await call(stack.kvstore.Retain, request)
        assert reply.retained >= 1
        assert 0 < reply.bytes <= size
