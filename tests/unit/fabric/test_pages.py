"""Shared memory lies where huge pages fit, keeps what is in it, and is unmapped with its last user."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fabric.kvlink import pages

NBYTES = 5 * (1 << 20) + 4096  # two huge pages, where they have 2 MiB, and a rest
TITLE = "deepinfer-test-pages"


@pytest.fixture
def descriptor() -> Iterator[int]:
    found = os.memfd_create(TITLE)
    os.ftruncate(found, NBYTES)
    yield found
    os.close(found)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count(TITLE)


def test_two_mappings_are_the_same_memory_at_addresses_that_huge_pages_can_have(descriptor):
    written, read = pages.map_file(descriptor, NBYTES, True), pages.map_file(descriptor, NBYTES, False)
    assert written.shape == read.shape == (NBYTES,)
    assert written.ctypes.data % pages.huge_bytes() == read.ctypes.data % pages.huge_bytes() == 0
    written[:] = 7
    assert (read == 7).all()


def test_memory_to_read_cannot_be_written(descriptor):
    memory = pages.map_file(descriptor, NBYTES, False)
    with pytest.raises(ValueError, match="read-only"):
        memory[0] = 1


def test_giving_pages_changes_no_byte_and_leaves_none_missing(descriptor):
    memory = pages.map_file(descriptor, NBYTES, True)
    values = np.random.default_rng(0).integers(0, 256, NBYTES // 2, dtype=np.uint8)
    memory[: NBYTES // 2] = values
    pages.give(memory)
    assert (memory[: NBYTES // 2] == values).all() and not memory[NBYTES // 2 :].any()
    assert os.fstat(descriptor).st_blocks * 512 >= NBYTES


def test_memory_is_unmapped_when_its_last_view_is_let_go(descriptor):
    memory = pages.map_file(descriptor, NBYTES, True)
    view = memory[100:200]
    del memory
    gc.collect()
    assert mappings() == 1 and not view.any()
    del view
    gc.collect()
    assert mappings() == 0


def test_what_the_host_does_not_map_is_an_error_and_leaves_nothing_behind(descriptor):
    os.close(kept := os.dup(descriptor))
    with pytest.raises(OSError):
        pages.map_file(kept, NBYTES, True)
    gc.collect()
    assert mappings() == 0


def test_a_host_without_huge_pages_gives_ordinary_ones(descriptor, monkeypatch):
    advise = pages._advise

    def without(address: int, nbytes: int, advice: int) -> None:
        if advice == pages._COLLAPSE:
            raise OSError(22, "Invalid argument")
        advise(address, nbytes, advice)

    monkeypatch.setattr(pages, "_advise", without)
    memory = pages.map_file(descriptor, NBYTES, True)
    pages.give(memory)
    assert os.fstat(descriptor).st_blocks * 512 >= NBYTES and not memory.any()
