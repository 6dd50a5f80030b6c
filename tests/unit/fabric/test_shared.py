"""Memory of another process is mapped only where its name provably leads to it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric.errors import InvalidArgument
from fabric.kvlink import shared
from fabric.kvlink.link import Token
from fabric.kvlink.shared import Mapping, Shared, SharedName

NBYTES = 3 << 20
DESCRIPTORS = Path("/proc/self/fd")


@pytest.fixture
def memory() -> Iterator[Shared]:
    allocated = shared.allocate(NBYTES)
    yield allocated
    allocated.close()


def opened(name: SharedName, **changes: Any) -> Mapping | None:
    return shared.open_mapping(dataclasses.replace(name, **changes))


def test_what_is_written_on_one_side_is_there_on_the_other(memory):
    mapping = opened(memory.name)
    assert mapping is not None
    mapping.memory[:] = 7
    assert (memory.memory == 7).all()
    assert not mapping.is_over()
    mapping.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"boot": b"another boot" + bytes(4)},
        {"started": 1},  # the number is another process's by now
        {"pid": 0},
        {"pid": 2**32 - 1},
        {"descriptor": 2**32 - 1},
        {"descriptor": 0},
        {"nonce": bytes(16)},
        {"nbytes": NBYTES - 1},
        {"nbytes": 1 << 40},
    ],
)
def test_a_name_that_does_not_fit_in_any_part_maps_nothing(memory, changes):
    before = len([*DESCRIPTORS.iterdir()])
    assert opened(memory.name, **changes) is None
    assert len([*DESCRIPTORS.iterdir()]) == before


def test_another_file_behind_the_same_number_is_not_mapped(memory):
    other = shared.allocate(NBYTES)
    kept = os.dup(memory.name.descriptor)
    os.dup2(other.name.descriptor, memory.name.descriptor)
    assert opened(memory.name) is None
    os.dup2(kept, memory.name.descriptor)
    os.close(kept)
    other.close()


def test_a_file_that_could_shrink_under_its_writer_is_not_mapped(memory):
    unsealed = os.memfd_create(memory.name.title)
    os.ftruncate(unsealed, NBYTES)
    assert opened(memory.name, descriptor=unsealed) is None
    os.close(unsealed)


def test_memory_outlives_its_owner_and_its_end_is_seen():
    script = (
        "import sys; from fabric.kvlink import shared; kept = shared.allocate(4096); kept.memory[:] = 5; "
        "print(kept.name.pack().hex(), flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    name = SharedName.unpack(bytes.fromhex(owner.stdout.readline()))
    mapping = shared.open_mapping(name)
    assert mapping is not None and not mapping.is_over()
    owner.kill()
    owner.wait()
    assert mapping.is_over()
    mapping.memory[:100] = 9  # a late write spoils nobody's memory
    assert (mapping.memory[100:] == 5).all()
    assert shared.open_mapping(name) is None
    mapping.close()


def test_a_token_carries_the_name_and_garbage_is_none(memory):
    token = Token(3, 4096, NBYTES, memory.name.pack())
    assert Token.unpack(token.pack()) == token
    assert SharedName.unpack(Token.unpack(token.pack()).shared) == memory.name
    with pytest.raises(InvalidArgument, match="name of shared memory"):
        SharedName.unpack(b"short")
    with pytest.raises(InvalidArgument, match="region token"):
        Token.unpack(bytes(1000))


def test_memory_is_zeroed(memory):
    assert not memory.memory.any() and memory.memory.dtype == np.uint8
