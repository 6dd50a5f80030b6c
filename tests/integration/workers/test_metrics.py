"""What a worker exports of its engine's steps and of memory that a writer in doubt may still reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.sampling.params import SamplingParams
from fabric.errors import DeadlineExceeded
from protos.deepinfer.v1 import decode_pb2
from tests.support.stack import Stack, worker_stack

TOKENS = [3 + index % 400 for index in range(300)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def metric(stack: Stack, name: str) -> float:
    role = name.partition("_")[0]
    value = stack.running[role].servicer.core.metrics.registry.get_sample_value(f"deepinfer_{name}")
    assert value is not None, name
    return float(value)


async def test_steps_are_exported_with_their_time_and_their_tokens(model: Path) -> None:
    async with worker_stack(model, kvstore=False) as stack:
        await stack.ask(TOKENS, GREEDY)
        assert metric(stack, "prefill_step_seconds_count") == 3  # chunks of 128
        assert metric(stack, "prefill_batch_tokens_sum") == len(TOKENS)
        assert metric(stack, "prefill_step_seconds_sum") > 0
        assert metric(stack, "decode_step_seconds_count") == metric(stack, "decode_batch_tokens_sum") == 3


async def test_landings_in_doubt_are_counted_in_blocks(model: Path) -> None:
    async with worker_stack(model, kvstore=False, prefill={"push_timeout_s": 1.5}) as stack:
        assert metric(stack, "decode_kv_blocks_quarantined") == metric(stack, "prefill_kv_blocks_quarantined") == 0
        link = stack.running["decode"].servicer.core.link
        ticket = await stack.reserve("left", TOKENS, len(TOKENS) + 4)
        link.freeze()
        with pytest.raises(DeadlineExceeded):
            await stack.prefilled("left", TOKENS, GREEDY, ticket)
        await stack.release(ticket, decode_pb2.WRITER_STATE_UNKNOWN)
        assert metric(stack, "decode_kv_blocks_quarantined") >= stack.engine("decode").model.layout.blocks_for(300)
        await stack.release(ticket, decode_pb2.WRITER_STATE_FINISHED)
        assert metric(stack, "decode_kv_blocks_quarantined") == 0
