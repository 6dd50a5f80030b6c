"""The trace replay through a real kvstore process hits what an endless cache would, and sees a single wrong byte."""

from __future__ import annotations

import numpy as np

from bench.kvstore_process import kvstore
from bench.kvstore_worker import layout_of, opened
from bench.kvtrace_caches import Infinite, hit_rate
from bench.kvtrace_requests import AgentShape, Request, agent_sessions
from bench.kvtrace_service import BLOCK, BLOCKS_PER_MB, Replay, share

SHAPE = AgentShape(
    sessions=2, common_tokens=160, first_tokens=80, turns=4, input_tokens=48, output_tokens=16, block_tokens=16
)
TCP = "tcp://127.0.0.1:0"


async def test_a_store_with_room_hits_as_an_endless_cache_does_and_every_wrong_byte_counts() -> None:
    requests = agent_sessions(SHAPE, seed=1)
    with kvstore("--memory-mb", "4", "--transport", TCP) as address:
        async with opened(address, TCP, layout_of(BLOCK, 16), 1 << 20) as worker:
            run = Replay(worker, requests, seed=0)
            for request in requests:
                await run.serve(request)
            assert share(requests, run.outcome.hits) == hit_rate(Infinite(), requests) > 50.0
            assert run.outcome.read_bytes == sum(run.outcome.hits) * BLOCK and run.outcome.wrong_bytes == 0
            run._content[0, 7] ^= np.uint8(1)  # what the store holds is no longer what was meant to be put
            await run.serve(requests[-1])
            assert run.outcome.wrong_bytes == 1


async def test_a_prompt_larger_than_the_store_leaves_its_beginning_and_nothing_that_is_cut_off() -> None:
    request = Request(0.0, 300 * 16, tuple(range(300)), tuple(range(300)), 16)
    with kvstore("--memory-mb", "1", "--transport", TCP) as address:
        async with opened(address, TCP, layout_of(BLOCK, 16), 1 << 20) as worker:
            run = Replay(worker, [request], seed=0)
            await run.serve(request)
            await run.serve(request)
            assert run.outcome.hits == [0, BLOCKS_PER_MB] and run.outcome.wrong_bytes == 0
