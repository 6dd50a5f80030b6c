"""The mapped lane: plain copies into memory of peers on this host. Knows mappings and whose they are, no NIXL.

A write through a mapping is one-sided as any other: its receiver cannot fence it, and what it writes into memory whose
owner has died is harmless. A mapping lives until its owner ends, or a newer incarnation of it is met.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fabric.kvlink.mappings import Mappings
from fabric.kvlink.plan import Copies
from fabric.kvlink.shared import Mapping, open_mapping

LANE = "mapped/memory"
# Copies of int64 [3, n]: offsets from a source and from a target address, and bytes. Runs without the interpreter.
CopyTable = Callable[[int, int, NDArray[np.int64]], None]
# The event loop copies so many bytes itself, for a third of a millisecond: to hand them over takes as long.
INLINE_BYTES = 4 << 20
# Up to here a copy keeps the interpreter: giving it up and waiting for it again takes longer.
_SMALL_BYTES = 64 << 10
_THREADS = 2

Work = Callable[[], None]


class MappedLane:
    """Public methods run in the event loop that made it; what `plan` returns runs anywhere."""

    def __init__(self, copy: CopyTable | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._copy = copy or copy_each
        self.mappings = Mappings(open_mapping)
        self._threads = ThreadPoolExecutor(_THREADS, "kvlink-copy")

    def has_met(self, planned: Sequence[Copies]) -> bool:
        """Whether it was found out which regions of these writes can be mapped."""
        return all(not (name := copies.target.shared) or self.mappings.has_met(name) for copies in planned)

    async def meet(self, peer: str, planned: Sequence[Copies]) -> None:
        """Finds it out, once for every region.

        Raises:
            InvalidArgument: a token's name of shared memory is none.
        """
        for copies in planned:
            packed = copies.target.shared
            if packed and not self.mappings.has_met(packed):
                found = await self._loop.run_in_executor(self._threads, self.mappings.open, packed)
                self.mappings.keep(peer, packed, found)

    def plan(self, planned: Sequence[Copies]) -> Work | None:
        """What writes everything; None where a region is not mapped, or its owner is known to have ended."""
        jobs = []
        for copies in planned:
            mapping = self.mappings.known(copies.target.shared)
            if mapping is None or copies.target.nbytes > mapping.memory.nbytes:
                return None
            jobs.append((mapping, copies))
        return partial(self._write, jobs)

    def is_over(self, planned: Sequence[Copies]) -> bool:
        """Whether the owner of a region has ended, asked anew."""
        found = [self.mappings.known(copies.target.shared) for copies in planned]
        return any(mapping is None or mapping.is_over() for mapping in found)

    def start(self, work: Work) -> Future[None]:
        """Runs it on a thread, to its end."""
        return self._threads.submit(work)

    def close(self) -> None:
        """Waits for copies that run; safe to repeat."""
        self.mappings.close()
        self._threads.shutdown()

    def _write(self, jobs: Sequence[tuple[Mapping, Copies]]) -> None:
        for mapping, copies in jobs:
            self._copy(copies.source.token.base, mapping.address, copies.table)


def copy_each(source: int, target: int, table: NDArray[np.int64]) -> None:
    """A `CopyTable` without a compiler."""
    for start, to, size in table.T.tolist():
        move = _move_small if size <= _SMALL_BYTES else ctypes.memmove
        move(target + to, source + start, size)


_move_small = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
