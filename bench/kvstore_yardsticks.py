"""What a kvstore's reads are held against: a bare NIXL WRITE, and a sequential read of its files. Knows no kvstore."""

from __future__ import annotations

import asyncio
import json
import mmap
import multiprocessing
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from bench.push import Bare, Geometry, Source
from fabric.kvlink import open_link, ucx_lanes
from fabric.records import Landing

_PIECE = 1 << 20
_TIMEOUT_S = 60.0


class BareWriter:
    """A process that writes `blocks` blocks of 1 MiB into a landing of this one, with nothing around NIXL."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    async def write(self, count: int = 1) -> float:
        """Seconds of `count` writes, in flight at a time."""
        self._pipe.send(count)
        took: float = await asyncio.to_thread(self._pipe.recv)
        return took


@contextmanager
def bare_writer(landing: Landing, blocks: int) -> Iterator[BareWriter]:
    """The writer, warm. Its process ends with the block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_write_when_told, args=(there, landing, blocks))
    process.start()
    there.close()
    try:
        if not here.poll(_TIMEOUT_S):
            raise RuntimeError("the bare writer did not start")
        here.recv()
        yield BareWriter(here)
        here.send(0)
        process.join(10)
    finally:
        process.kill()
        process.join()


def _write_when_told(pipe: Connection, landing: Landing, blocks: int) -> None:
    ucx_lanes.prepare()
    asyncio.run(_writes(pipe, landing, blocks))
    os._exit(0)  # destructors of the wheel's libraries may crash


async def _writes(pipe: Connection, landing: Landing, blocks: int) -> None:
    link = open_link("ucx://", "bench-bare", 1)
    source = Source(link, Geometry("blocks", blocks, (_PIECE,)), np.random.default_rng(0))
    bare = Bare(source.writes(landing), landing)
    bare.write()
    pipe.send(True)
    while count := await asyncio.to_thread(pipe.recv):
        started = time.perf_counter()
        bare.write(count)
        pipe.send(time.perf_counter() - started)
    bare.close()
    await link.close()


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads files one after the other from start to end. `program` is fio, or empty: then a loop of preadv here."""

    program: str

    @classmethod
    def found(cls, program: str) -> Reader:
        """fio where there is one, by name or path."""
        return cls(shutil.which(program) or "")

    @property
    def name(self) -> str:
        """What tables call it: a stand-in must not pass for fio."""
        return "fio" if self.program else "own sequential preadv, there is no fio"

    def rate(self, files: Sequence[Path], direct: bool, on_page: bool = False) -> float:
        """Bytes per second, in pieces of 1 MiB, past the page cache if `direct`, else from it as far as it has them.

        `on_page`: into memory at the address of a page. From the page cache fio reads to 16 bytes behind one, where the
        kernel's copy is several times slower on some processors; the stand-in's memory is always on one.

        Raises:
            RuntimeError: fio failed; its words are in the message.
        """
        return self._fio(files, direct, on_page) if self.program else _preadv(files, direct)

    def _fio(self, files: Sequence[Path], direct: bool, on_page: bool) -> float:
        command = [
            self.program, "--name=read", "--rw=read", "--bs=1M", "--ioengine=psync", "--readonly", "--invalidate=0",
            f"--direct={int(direct)}", "--file_service_type=sequential", "--output-format=json",
            "--filename=" + ":".join(str(path).replace(":", r"\:") for path in files),
            *(["--iomem_align=4k"] if on_page else []),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{self.program} failed: {(done.stderr or done.stdout)[-500:]}")
        figures = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
        return float(figures["io_bytes"]) / (float(figures["runtime"]) / 1000)


def _preadv(files: Sequence[Path], direct: bool) -> float:
    buffer = mmap.mmap(-1, _PIECE)  # aligned, as unbuffered reads want it
    total, started = 0, time.perf_counter()
    for path in files:
        descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            offset = 0
            while count := os.preadv(descriptor, [buffer], offset):
                offset += count
        finally:
            os.close(descriptor)
        total += offset
    return total / (time.perf_counter() - started)


def median_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Median over rounds of the first figure as a share of the second one of the same round."""
    return statistics.median(mine / theirs for mine, theirs in pairs)
