"""KV push between two processes: the link against a bare NIXL WRITE of the same descriptors; commit against memcpy.

The default geometry is one nano prompt: blocks scattered over the pool by a block table, plus one window slot. Bare
means one agent, one prebuilt descriptor list, one tight loop on its status; the link adds planning, its thread,
deadline, notice and asyncio. Rounds alternate between both; the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from bench.arguments import Parser, byte_size, new_file, positive
from bench.table import Row, report
from fabric.kvlink import open_link, plan, ucx_lanes
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.link import Bytes, Link, Region, Write
from fabric.kvlink.plan import lay_out, write_to
from fabric.kvlink.verify import Placement, digest
from fabric.records import Extent, Landing
from kernels.host.sealed_copy import copy_sealed

NANO = Path(__file__).parents[1] / "models" / "nano" / "config.json"
PUSH_BAR = 0.70  # of the bare rate, for the nano prompt
TIMEOUT_S = 30.0
NIXL_ALONE = "ucx://?mapped=off"  # a mapped lane is no NIXL WRITE: bench.handoff has it


@dataclass(frozen=True, slots=True)
class Geometry:
    """Extents of one push: `rows` rows of a pool, each row a run of `extents` bytes; plus one window slot."""

    name: str
    rows: int
    extents: tuple[int, ...]
    slot: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.rows * sum(self.extents) + sum(self.slot)


def nano_prompt(tokens: int) -> Geometry:
    """What prefill pushes for a prompt of `tokens` tokens of the nano model, fp32 records."""
    from engine.families.v4.config import parse
    from engine.families.v4.layout import v4_layout

    layout = v4_layout(parse(json.loads(NANO.read_text())), "float32", 128)
    blocks = tuple(group.extent_bytes for group in layout.groups if group.kind == "global")
    slot = tuple(group.extent_bytes for group in layout.groups if group.kind == "window")
    return Geometry(f"nano, {tokens} tokens", -(-tokens // layout.block_tokens), blocks, slot)


class Source:
    """A pool as prefill has it: twice the rows that are pushed, in an order of its own."""

    def __init__(self, link: Link, geometry: Geometry, rng: np.random.Generator) -> None:
        self._geometry, self._row_bytes, self._slot_bytes = geometry, sum(geometry.extents), sum(geometry.slot)
        pool = rng.integers(0, 256, (2 * geometry.rows, self._row_bytes), dtype=np.uint8)
        slot = rng.integers(0, 256, max(1, self._slot_bytes), dtype=np.uint8)
        self._pool, self._slot = link.register(pool), link.register(slot)
        self._table = rng.permutation(2 * geometry.rows)[: geometry.rows].astype(np.int64)

    def writes(self, landing: Landing) -> list[Write]:
        """The push of everything as prefill does it: one copy for every row, one for the window slot."""
        sizes = np.full(self._geometry.rows, self._row_bytes, np.int64)
        found = [write_to(landing, self._pool, self._table * self._row_bytes, lay_out(sizes), sizes)]
        if self._slot_bytes:
            start, size = np.array([sizes.sum()], np.int64), np.array([self._slot_bytes], np.int64)
            found.append(write_to(landing, self._slot, np.zeros(1, np.int64), start, size))
        return found

    def extents(self, landing: Landing) -> list[Extent]:
        """The receipt of `writes`."""
        inside = self._geometry.extents, self._geometry.slot
        return [
            _sealed(write.source, int(source) + offset, int(target) - landing.offset + offset, size)
            for write, sizes in zip(self.writes(landing), inside, strict=False)
            for source, target in zip(write.source_offsets, write.target_offsets, strict=True)
            for offset, size in zip(lay_out(np.array(sizes, np.int64)).tolist(), sizes, strict=True)
        ]


def _sealed(source: Region, start: int, offset: int, size: int) -> Extent:
    return Extent("bench", 0, 1, offset, size, digest(source.memory[start : start + size]))


class Bare:
    """NIXL as its own examples use it, with the progress delay of the link."""

    def __init__(self, writes: list[Write], landing: Landing) -> None:
        import nixl_cu12._bindings as nixl

        from fabric.kvlink.ucx_agent import PROGRESS_DELAY_US

        self._nixl = nixl
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, PROGRESS_DELAY_US
        self._agent: Any = nixl.nixlAgent("bare#1", config)
        options, _ = self._agent.getPluginParams("UCX")
        self._backend = self._agent.createBackend("UCX", options)
        self._registered = [self._register(write.source.memory) for write in writes]
        self._peer = self._agent.loadRemoteMD(landing.address.metadata)
        local, remote = (np.concatenate(tables) for tables in zip(*map(_tables, writes), strict=True))
        self.descriptors = len(local)
        self._local = nixl.nixlXferDList(nixl.DRAM_SEG, local)
        self._remote = nixl.nixlXferDList(nixl.DRAM_SEG, remote)

    def write(self, count: int = 1) -> None:
        """`count` writes of everything, all of them begun before one is waited for."""
        nixl, agent = self._nixl, self._agent
        lists = self._local, self._remote, self._peer, b"x", [self._backend]
        handles = [agent.createXferReq(nixl.NIXL_WRITE, *lists) for _ in range(count)]
        states = [agent.postXferReq(handle) for handle in handles]
        for handle, state in zip(handles, states, strict=True):
            while state == nixl.NIXL_IN_PROG:
                state = agent.getXferStatus(handle)
            agent.releaseXferReq(handle)

    def close(self) -> None:
        for descriptors in self._registered:
            self._agent.deregisterMem(descriptors, [self._backend])
        self._agent = None

    def _register(self, memory: Bytes) -> Any:
        nixl = self._nixl
        table = np.array([[memory.ctypes.data, memory.nbytes, 0]], np.uint64)
        descriptors = nixl.nixlRegDList(nixl.DRAM_SEG, table)
        self._agent.registerMem(descriptors, [self._backend])
        return descriptors


def _tables(write: Write) -> tuple[np.ndarray, np.ndarray]:
    """Local and remote descriptors of the list that the link sends, uint64 [n, 3]."""
    copies = plan.copies(write)
    source, target, sizes = copies.table
    zeros = np.zeros(len(sizes), np.int64)
    local = np.stack([source + copies.source.token.base, sizes, zeros], axis=1)
    remote = np.stack([target + copies.target.base, sizes, zeros], axis=1)
    return local.astype(np.uint64), remote.astype(np.uint64)


def target(pipe: Connection, nbytes: int) -> None:
    """The other process: grants one landing, commits it when told, and compares with memcpy."""
    asyncio.run(_target(pipe, nbytes))


async def _target(pipe: Connection, nbytes: int) -> None:
    link = open_link(NIXL_ALONE, "bench-target", 1)
    pool = LandingPool(link, nbytes, kernel=copy_sealed)
    pipe.send(pool.grant("bench", nbytes))
    loop = asyncio.get_running_loop()
    while (order := await loop.run_in_executor(None, pipe.recv)) is not None:
        extents, rounds = order
        placements = [Placement(extent, np.zeros(extent.size, np.uint8)) for extent in extents]
        pipe.send(await _commit_and_copy(pool, placements, rounds))
    await link.close()


async def _commit_and_copy(pool: LandingPool, placements: list[Placement], rounds: int) -> tuple[float, float]:
    """Median seconds of a verified commit, and of copying the same extents without looking."""
    commits, copies = [], []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        await pool.commit("bench", placements)
        commits.append(time.perf_counter() - started)
        sources = [placement.destination.copy() for placement in placements]
        started = time.perf_counter()
        for placement, source in zip(placements, sources, strict=True):
            np.copyto(placement.destination, source)
        copies.append(time.perf_counter() - started)
    return statistics.median(commits[1:]), statistics.median(copies[1:])


async def measure(geometry: Geometry, rounds: int, bar: float | None) -> tuple[list[Row], str]:
    """Rows of one geometry and the lane that carried them."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=target, args=(there, geometry.nbytes))
    child.start()
    link = open_link(NIXL_ALONE, "bench-source", 1)
    try:
        landing: Landing = await asyncio.to_thread(here.recv)
        source = Source(link, geometry, np.random.default_rng(0))
        bare_s, push_s, ratio, descriptors = await push_rounds(link, source, landing, rounds)
        here.send((source.extents(landing), rounds))
        commit_s, copy_s = await asyncio.to_thread(here.recv)
        here.send(None)
        lane = link.lane
    finally:
        await link.close()
        child.join(10)
        child.kill()
    gigabytes = geometry.nbytes / 1e9
    rows = [
        Row(f"{geometry.name}: {descriptors} descriptors", geometry.nbytes / 1e6, "MB"),
        Row("  bare NIXL WRITE", gigabytes / bare_s, "GB/s"),
        Row("  link push", gigabytes / push_s, "GB/s"),
        Row("  push / bare", ratio, "", bar, ">="),
        Row("  memcpy of the extents", gigabytes / copy_s, "GB/s"),
        Row("  verified commit", gigabytes / commit_s, "GB/s"),
        Row("  commit / memcpy", copy_s / commit_s),
    ]
    return rows, lane


async def push_rounds(link: Link, source: Source, landing: Landing, rounds: int) -> tuple[float, float, float, int]:
    """Medians over alternating rounds: seconds of a bare write, of a push, and their ratio within a round; and the
    number of descriptors of both."""
    writes = source.writes(landing)
    bare = Bare(writes, landing)
    bare_s, push_s = [], []
    for _ in range(rounds + 2):
        bare_s.append(_timed(bare.write))
        started = time.perf_counter()
        await link.push(landing.address, writes, notify=b"x", timeout_s=TIMEOUT_S)
        push_s.append(time.perf_counter() - started)
    bare.close()
    ratio = statistics.median(bare_ / push for bare_, push in zip(bare_s[2:], push_s[2:], strict=True))
    return statistics.median(bare_s[2:]), statistics.median(push_s[2:]), ratio, bare.descriptors


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main(arguments: list[str]) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--json", type=new_file, help="write the table as JSON, too")
    parser.add_argument("--bytes", type=byte_size, default=64 << 20, help="size of the second push, in rows of 1 MiB")
    parser.add_argument("--tokens", type=positive, default=4096, help="length of the nano prompt")
    parser.add_argument("--rounds", type=positive, default=41, help="pushes of each kind; medians are shown")
    options = parser.parse_args(arguments)
    ucx_lanes.prepare()
    large = Geometry("large blocks", max(1, options.bytes >> 20), (1 << 20,))
    rows, lane = asyncio.run(measure(nano_prompt(options.tokens), options.rounds, PUSH_BAR))
    more, _ = asyncio.run(measure(large, options.rounds, None))
    return report(f"KV push between two processes, lane {lane}", [*rows, *more], options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
