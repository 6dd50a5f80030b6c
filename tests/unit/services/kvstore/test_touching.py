"""Memory is touched beforehand, page by page, and no byte of it changes."""

from __future__ import annotations

import errno
import mmap
import resource

import numpy as np

from services.kvstore import touching
from services.kvstore.touching import populate, touch

PAGES = 2048


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


async def test_touched_memory_is_as_it_was_and_its_first_use_meets_no_fault(monkeypatch):
    monkeypatch.setattr(touching, "_STEP_BYTES", 100 * mmap.PAGESIZE)
    block = mmap.mmap(-1, PAGES * mmap.PAGESIZE)
    block.madvise(mmap.MADV_NOHUGEPAGE)
    memory = np.frombuffer(block, np.uint8)
    memory[5 :: 300 * mmap.PAGESIZE] = 7
    await touch(memory)
    before = faults()
    memory[:: mmap.PAGESIZE] |= 1
    assert faults() - before < PAGES // 10
    memory[:: mmap.PAGESIZE] = 0
    assert (memory[5 :: 300 * mmap.PAGESIZE] == 7).all() and int(memory.sum()) == 7 * -(-PAGES // 300)


async def test_a_host_that_cannot_touch_leaves_memory_as_it_is(monkeypatch):
    asked = []

    def refuse(memory: np.ndarray) -> None:
        asked.append(len(memory))
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(touching, "populate", refuse)
    await touch(np.zeros(64 << 20, np.uint8))
    assert len(asked) == 1


def test_memory_that_starts_within_a_page_is_touched_too():
    memory = np.zeros(10 * mmap.PAGESIZE, np.uint8)
    populate(memory[100:-100])
    assert not memory.any()
