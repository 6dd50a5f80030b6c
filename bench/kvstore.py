"""Verified reads of 1 MiB blocks by one worker from a real kvstore process over UCX: from its DRAM, and from its disk.

`python -m bench.kvstore [--fio PATH] [--json PATH]`. DRAM is held against a bare NIXL WRITE of as many bytes into the
same worker, two reads at a time against two such writes in flight, and the disk against fio's sequential read of the
store's own files, once from the page cache and once past it. Rounds alternate between both sides, and over the disk who
comes first; ratios are medians over rounds of one run. What is read goes to memory that was written to before, on
either side. Before every pass over the disk the store's DRAM is emptied by the operator's call. Every digest that
arrives is compared with that of what was put.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop

from bench.arguments import Parser, byte_size, existing_folder, new_file, positive, program
from bench.kvstore_process import kvstore
from bench.kvstore_worker import Block, StoreWorker, chain, layout_of, opened
from bench.kvstore_yardsticks import Reader, bare_writer, median_ratio
from bench.table import Row, report
from fabric import garbage
from fabric.errors import DataLoss
from fabric.kvlink import ucx_lanes
from fabric.kvlink.link import Bytes, Region
from fabric.kvlink.slabs import Writer
from fabric.kvlink.verify import digest
from kernels.host.sealed_copy import copy_sealed

BLOCK, TOKENS = 1 << 20, 128
DRAM_BAR, NVME_BAR = 0.70, 0.80
_FOUND_S = 60.0
_WARM_UP = 2  # rounds that do not count


@dataclass(frozen=True, slots=True)
class Plan:
    """`blocks` of one read from DRAM, `long_blocks` of a long one; `disk_blocks` of one pass over the disk, in reads of
    `disk_read` blocks."""

    blocks: int
    long_blocks: int
    rounds: int
    disk_blocks: int
    disk_read: int
    disk_rounds: int
    window_bytes: int
    folder: Path
    reader: Reader


@dataclass(frozen=True, slots=True)
class Prefix:
    """Blocks of one prefix, their bytes (uint8 [blocks * BLOCK], seeded) and the digest of each."""

    blocks: list[Block]
    content: Bytes
    digests: list[int]

    @classmethod
    def seeded(cls, blocks: int, seed: int) -> Prefix:
        content = np.random.default_rng(seed).integers(0, 256, blocks * BLOCK, dtype=np.uint8)
        digests = [digest(row) for row in content.reshape(blocks, BLOCK)]
        return cls(chain(range(blocks), TOKENS), content, digests)

    async def put(self, worker: StoreWorker, source: Region) -> None:
        """Stores all of it."""
        await worker.put_all(self.blocks, source, [index * BLOCK for index in range(len(self.blocks))])

    async def read(self, worker: StoreWorker, target: Bytes, first: int, count: int) -> float:
        """Seconds of a verified read. Raises DataLoss where it brought less, or other bytes than were put."""
        started = time.perf_counter()
        read = await worker.get(self.blocks[first : first + count], target[:count], first)
        took = time.perf_counter() - started
        if list(read.digests) != self.digests[first : first + count]:
            raise DataLoss(f"{read.blocks} of {count} blocks came as they were put", field="blocks")
        return took


async def dram(plan: Plan) -> list[Row]:
    """Rows of reads from DRAM beside a bare write: one at a time, two of one worker at a time, and long ones."""
    rows = await _from_dram(plan, plan.blocks, (1, 2))
    return rows + (await _from_dram(plan, plan.long_blocks, (1,)) if plan.long_blocks else [])


async def _from_dram(plan: Plan, blocks: int, at_a_time: Sequence[int]) -> list[Row]:
    prefix, size, most = Prefix.seeded(blocks, seed=1), blocks * BLOCK, max(at_a_time)
    targets = [np.zeros((blocks, BLOCK), np.uint8) for _ in range(most)]
    # Of a store's DRAM one read keeps a quarter in place at a time, and all reads half: larger ones are for the disk.
    options = ("--memory-mb", str(4 * blocks), "--landing-mb", str(2 * blocks))
    pairs: dict[int, list[tuple[float, float]]] = {count: [] for count in at_a_time}
    layout = layout_of(BLOCK, TOKENS)
    with kvstore(*options) as address:
        async with opened(address, "ucx://", layout, plan.window_bytes, copy_sealed, beside_bytes=size) as worker:
            await prefix.put(worker, worker.link.register(prefix.content))
            landing = worker.landings.grant("bare", size)
            with bare_writer(landing, blocks) as bare:
                for count in (plan.rounds + _WARM_UP) * list(at_a_time):
                    mine = await _reads(prefix, worker, targets[:count])
                    pairs[count].append((count * size / mine, count * size / await bare.write(count)))
            worker.landings.release("bare", Writer.FINISHED)
    if not all(np.array_equal(target.reshape(-1), prefix.content) for target in targets):
        raise DataLoss("what was read is not what was put", field="bytes")
    return [row for count in at_a_time for row in _beside_bare(blocks, count, pairs[count][_WARM_UP:])]


async def _reads(prefix: Prefix, worker: StoreWorker, targets: Sequence[Bytes]) -> float:
    """Seconds of as many verified reads at a time, all of them together."""
    started = time.perf_counter()
    await asyncio.gather(*(prefix.read(worker, target, 0, len(prefix.blocks)) for target in targets))
    return time.perf_counter() - started


def _beside_bare(blocks: int, count: int, pairs: Sequence[tuple[float, float]]) -> list[Row]:
    what = f"{blocks} MiB" if count == 1 else f"{count} x {blocks} MiB at a time"
    return [
        Row(f"{what}, bare NIXL WRITE", _gigabytes(theirs for _, theirs in pairs), "GB/s"),
        Row("  from DRAM, verified", _gigabytes(mine for mine, _ in pairs), "GB/s"),
        Row("  DRAM / bare", median_ratio(pairs), "", DRAM_BAR, ">="),
    ]


async def disk(plan: Plan, direct: bool) -> list[Row]:
    """Rows of reads from the disk, one way of reading it, beside a sequential read of the same files."""
    with tempfile.TemporaryDirectory(dir=plan.folder, prefix="bench-kvstore-") as name:
        folder, prefix = Path(name), Prefix.seeded(plan.disk_blocks, seed=2)
        async with _store(plan, folder, direct) as worker:
            await _fill(plan, worker, folder, prefix)
            passes = _Passes(plan, worker, _segments(folder), prefix, direct)
            rounds = [await passes.round(number) for number in range(_WARM_UP + plan.disk_rounds)][_WARM_UP:]
    way, name = "O_DIRECT" if direct else "page cache", plan.reader.name
    ratio = median_ratio([(each.mine, each.theirs) for each in rounds])
    return [
        Row(f"{plan.disk_blocks} MiB on disk, {way}: {name}", _gigabytes(each.theirs for each in rounds), "GB/s"),
        Row("  from NVMe, verified", _gigabytes(each.mine for each in rounds), "GB/s"),
        Row(f"  NVMe / {name}, {way}", ratio, "", NVME_BAR, ">="),
        *([] if direct else _on_page(plan, rounds)),
    ]


def _on_page(plan: Plan, rounds: Sequence[_Round]) -> list[Row]:
    """Beside the yardstick as it reads where its memory is on a page, as the store's always is."""
    ratio = median_ratio([(each.mine, each.on_page) for each in rounds])
    return [
        Row(f"  {plan.reader.name}, its memory on a page", _gigabytes(each.on_page for each in rounds), "GB/s"),
        Row("  NVMe / that", ratio, ""),
    ]


def _gigabytes(rates: Iterable[float]) -> float:
    """The median, in GB/s."""
    return statistics.median(rates) / 1e9


def _options(plan: Plan, folder: Path, direct: bool) -> Sequence[str]:
    gigabytes = str(2 * plan.disk_blocks / 1024)
    memory = ("--memory-mb", str(4 * plan.disk_read), "--landing-mb", str(4 * plan.disk_read))
    way = "--nvme-direct" if direct else "--no-nvme-direct"
    queue = ("--nvme-queue-share", "0.75")  # what was put last may not be synced when more is put
    return *memory, *queue, "--nvme-dir", str(folder), "--nvme-gb", gigabytes, way


@asynccontextmanager
async def _store(plan: Plan, folder: Path, direct: bool) -> AsyncIterator[StoreWorker]:
    with kvstore(*_options(plan, folder, direct)) as address:
        async with opened(address, "ucx://", layout_of(BLOCK, TOKENS), plan.window_bytes, copy_sealed) as worker:
            yield worker


async def _fill(plan: Plan, worker: StoreWorker, folder: Path, prefix: Prefix) -> None:
    """Puts the prefix, some at a time, each on the disk before the next: a full queue would drop some."""
    source = worker.link.register(prefix.content)
    for first in range(0, plan.disk_blocks, plan.disk_read):
        end = min(first + plan.disk_read, plan.disk_blocks)
        await worker.put_all(prefix.blocks[first:end], source, [index * BLOCK for index in range(first, end)])
        await _on_disk(folder, end)


def _segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.segment"))


async def _on_disk(folder: Path, blocks: int) -> None:
    async with asyncio.timeout(_FOUND_S):
        while sum(path.stat().st_size for path in _segments(folder)) < blocks * BLOCK:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # the store announces it to nobody


@dataclass(frozen=True, slots=True)
class _Round:
    """Bytes per second of the store, of the yardstick, and of the yardstick with its memory on a page."""

    mine: float
    theirs: float
    on_page: float


class _Passes:
    """Passes over the whole prefix by both sides, one way of reading the disk."""

    def __init__(self, plan: Plan, worker: StoreWorker, files: Sequence[Path], prefix: Prefix, direct: bool) -> None:
        self._plan, self._worker, self._files, self._prefix, self._direct = plan, worker, files, prefix, direct
        # Not zeros: pages that nobody wrote to would come one by one, within the time of the first pass.
        self._target = np.ones((plan.disk_read, BLOCK), np.uint8)

    async def round(self, number: int) -> _Round:
        """Both sides, in turns first."""
        if not self._direct:
            await self._theirs()  # into the page cache
        mine = await self._mine() if number % 2 else 0.0
        theirs = await self._theirs()
        on_page = theirs if self._direct else await self._theirs(on_page=True)
        return _Round(mine or await self._mine(), theirs, on_page)

    async def _theirs(self, on_page: bool = False) -> float:
        return await asyncio.to_thread(self._plan.reader.rate, self._files, self._direct, on_page)

    async def _mine(self) -> float:
        """Nothing is in the store's DRAM at first."""
        await self._worker.empty_dram()
        blocks, step, took = self._plan.disk_blocks, self._plan.disk_read, 0.0
        for first in range(0, blocks, step):
            took += await self._prefix.read(self._worker, self._target, first, min(step, blocks - first))
        return blocks * BLOCK / took


def main(arguments: list[str]) -> int:
    """Parse, measure, report; exit code 1 where a bar is missed."""
    parser = Parser(description=__doc__)
    parser.add_argument("--json", type=new_file, help="write the table as JSON, too")
    parser.add_argument("--fio", type=program, help="fio (default: the one there is; files are read here without one)")
    parser.add_argument(
        "--dir", type=existing_folder, default=Path(tempfile.gettempdir()), help="for the store's files"
    )
    parser.add_argument("--blocks", type=positive, default=64, help="blocks of 1 MiB of one read from DRAM")
    parser.add_argument("--long-blocks", type=int, default=256, help="blocks of one long read from DRAM; 0: none")
    parser.add_argument("--rounds", type=positive, default=21, help="reads from DRAM")
    parser.add_argument("--disk-blocks", type=positive, default=512, help="blocks on disk")
    parser.add_argument("--disk-read", type=positive, default=128, help="blocks of one read from the disk")
    parser.add_argument("--disk-rounds", type=int, default=9, help="passes over the disk, each way; 0: none")
    parser.add_argument("--window-bytes", type=byte_size, default=16 << 20, help="landing memory of one read")
    options = parser.parse_args(arguments)
    if min(options.long_blocks, options.disk_rounds) < 0:
        parser.error("--long-blocks and --disk-rounds: 0 or more")
    ucx_lanes.prepare()
    garbage.spare_what_stays()  # as every service does
    plan = Plan(
        options.blocks, options.long_blocks, options.rounds, options.disk_blocks, options.disk_read,
        options.disk_rounds, options.window_bytes, options.dir, Reader.found(options.fio or "fio"),
    )  # fmt: skip
    return report("Verified reads of 1 MiB blocks by one worker", uvloop.run(measure(plan)), options.json)


async def measure(plan: Plan) -> list[Row]:
    """All rows."""
    rows = await dram(plan)
    if plan.disk_rounds:
        rows += [*await disk(plan, direct=True), *await disk(plan, direct=False)]
    return rows


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # destructors of the wheel's libraries may crash after the last line
