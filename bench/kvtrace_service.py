"""Replays requests against a real kvstore process with real bytes, beside the policy's simulation of the same requests.

Blocks are small, so that a working set fits a small store; what counts is which of them are held. Each request does
what a worker does: Lookup of its prompt's blocks, Get of those held, Put of what it offers. Every byte of every Get is
compared with what was put. Requests follow each other as fast as they are answered; the simulation is told the times
at which the service was asked.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bench.arguments import positive
from bench.kvstore_process import kvstore
from bench.kvstore_worker import Block, StoreWorker, chain, layout_of, opened
from bench.kvtrace_caches import Infinite, hit_rate
from bench.kvtrace_policy import Policy
from bench.kvtrace_requests import AgentShape, Request, working_set
from bench.table import Row
from fabric.kvlink.link import Bytes, Region

BLOCK = 4096
BLOCKS_PER_MB = (1 << 20) // BLOCK
# Percentage points between the service's hits and the simulation's: a store that is full decides on whole offers, the
# simulation block by block.
TOLERANCE = 2.0
_TOKENS = 16  # told of each block; how many it stands for is the request's to say
_WINDOW = 16 << 20

# The published agent session with everything but the number of blocks an eighth as large: the ideal stays 96.8 %.
SMALL_AGENT = AgentShape(
    sessions=6, common_tokens=2_500, first_tokens=1_250, input_tokens=256, output_tokens=112, block_tokens=16
)


@dataclass(slots=True)
class Outcome:
    """What the service did: blocks hit by each request, when it was asked, and what was read."""

    hits: list[int] = field(default_factory=list)
    asked_s: list[float] = field(default_factory=list)
    read_bytes: int = 0
    wrong_bytes: int = 0
    took_s: float = 0.0


class Replay:
    """One worker that serves requests, with the bytes of all their blocks: uint8 [blocks, BLOCK], seeded."""

    def __init__(self, worker: StoreWorker, requests: Sequence[Request], seed: int) -> None:
        self._worker = worker
        ids = dict.fromkeys(block for request in requests for block in (*request.looked_up, *request.offered))
        self._rows = {block: row for row, block in enumerate(ids)}
        self._content = np.random.default_rng(seed).integers(0, 256, (len(ids), BLOCK), dtype=np.uint8)
        self._source: Region = worker.link.register(self._content.reshape(-1))
        self._target: Bytes = np.zeros((max(len(request.looked_up) for request in requests), BLOCK), np.uint8)
        self.outcome = Outcome()

    async def serve(self, request: Request) -> None:
        """Looks up, reads and offers as a worker does, and compares what was read."""
        self.outcome.asked_s.append(time.monotonic())
        names = chain(request.looked_up, _TOKENS)
        held = await self._worker.lookup(names)
        hit = (await self._worker.get(names[:held], self._target)).blocks if held else 0
        self._compare(request.looked_up[:hit])
        self.outcome.hits.append(hit)
        await self._offer(request, chain(request.offered, _TOKENS))

    def _compare(self, blocks: Sequence[int]) -> None:
        wanted = self._content[[self._rows[block] for block in blocks]]
        self.outcome.read_bytes += wanted.size
        self.outcome.wrong_bytes += int(np.count_nonzero(self._target[: len(blocks)] != wanted))

    async def _offer(self, request: Request, blocks: Sequence[Block]) -> None:
        starts = [self._rows[block] * BLOCK for block in request.offered]
        await self._worker.put(blocks, self._source, starts)


async def replay(requests: Sequence[Request], megabytes: int, seed: int, transport: str) -> Outcome:
    """Serves all requests by a kvstore of so much DRAM. Raises RuntimeError where it does not come up."""
    options = ("--memory-mb", str(megabytes), "--transport", transport)
    with kvstore(*options) as address:
        async with opened(address, transport, layout_of(BLOCK, _TOKENS), _WINDOW) as worker:
            run = Replay(worker, requests, seed)
            started = time.monotonic()
            for request in requests:
                await run.serve(request)
            run.outcome.took_s = time.monotonic() - started
    return run.outcome


def add_service_options(parser: argparse.ArgumentParser) -> None:
    """What `service_rows` is told."""
    parser.add_argument("--service", action="store_true", help="replay through a real kvstore, with real bytes")
    parser.add_argument("--requests", type=positive, default=600, help="with --service: most requests, from the first")
    parser.add_argument("--blocks", type=int, default=0, help="with --service: its room; 0: the working set")
    parser.add_argument("--transport", default="ucx://", help="with --service: what carries the bytes")


def service_rows(requests: Sequence[Request], options: argparse.Namespace) -> list[Row]:
    """Rows of one replay, with room for whole MiB of blocks."""
    chosen = list(itertools.islice(requests, max(1, options.requests)))
    megabytes = -(-(options.blocks or working_set(chosen)) // BLOCKS_PER_MB)
    outcome = asyncio.run(replay(chosen, megabytes, options.seed, options.transport))
    timed = [replace(request, time_s=at) for request, at in zip(chosen, outcome.asked_s, strict=True)]
    simulated = hit_rate(Policy(megabytes * BLOCKS_PER_MB), timed)
    served = share(chosen, outcome.hits)
    title = f"{len(chosen)} requests, {megabytes * BLOCKS_PER_MB} blocks of {BLOCK} B"
    return [
        Row(f"{title}: infinite cache", hit_rate(Infinite(), chosen), "%"),
        Row("  simulation of the policy", simulated, "%"),
        Row("  service", served, "%"),
        Row("  service and simulation apart", abs(served - simulated), "points", TOLERANCE),
        Row("  bytes read and compared", outcome.read_bytes / 1e6, "MB"),
        Row("  wrong bytes", outcome.wrong_bytes, "", 0.0),
        Row("  requests per second", len(chosen) / outcome.took_s, "/s"),
    ]


def share(requests: Sequence[Request], hits: Sequence[int]) -> float:
    """Percent of prompt tokens hit."""
    hit = sum(request.hit_tokens(blocks) for request, blocks in zip(requests, hits, strict=True))
    return 100 * hit / sum(request.tokens for request in requests)
