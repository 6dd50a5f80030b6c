"""A kvstore that dies while it writes, and files that were damaged: misses, never wrong bytes (promise 8)."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fabric.kvlink.verify import copy_rows
from services.kvstore.nvme.files import SegmentFiles
from tests.support import procs
from tests.support.promises import Recorder
from tests.support.segment_writer import SEGMENT_BYTES, payload


def killed_while_writing(folder: Path, first: int, records: int) -> int:
    """A writer that is killed some time after it wrote `records` records; returns the last one that it told of."""
    command = [sys.executable, "-m", "tests.support.segment_writer", str(folder), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=procs.ROOT) as writer:
        assert writer.stdout is not None
        told = first - 1
        for _ in range(records):
            told = int(writer.stdout.readline())
        writer.kill()
        rest = writer.stdout.read().split()
    return int(rest[-1]) if rest else told


def sound(folder: Path) -> tuple[set[int], int]:
    """Numbers of the records that the directory gives back, and how many it does not. Fails for one that is wrong."""
    files = SegmentFiles(folder, SEGMENT_BYTES, direct=False)
    numbers: set[int] = set()
    missed = 0
    try:
        for item in (item for number in files.numbers for item in files.scan(number)):
            read = files.read(item[0]) if item is not None else None
            if read is None:
                missed += 1
                continue
            head, data = read
            number, target = int.from_bytes(head.stored.id.key), np.zeros(head.stored.size, np.uint8)
            rows = [
                (each.offset, each.size, each.digest, target[each.offset : each.end]) for each in head.stored.extents
            ]
            if copy_rows(data, rows) is None:
                assert (target == payload(number)).all(), f"record {number} came back wrong"
                numbers.add(number)
            else:
                missed += 1
    finally:
        files.close()
    return numbers, missed


def kill_rounds(folder: Path, rounds: int, seed: int) -> tuple[int, int]:
    """Records written over all rounds, and damage found after them."""
    chance, first, damage = random.Random(seed), 0, 0
    for _ in range(rounds):
        told = killed_while_writing(folder, first, chance.randrange(1, 40))
        numbers, missed = sound(folder)
        assert numbers >= set(range(told + 1)), "what the writer told of outlives it"
        first, damage = max(numbers) + 1, missed
    return first, damage


def test_a_store_killed_while_it_writes_keeps_what_it_told_of(tmp_path: Path) -> None:
    records, damage = kill_rounds(tmp_path, 3, seed=1)
    print(f"3 kills: {records} records sound, {damage} torn")


@pytest.mark.slow
@pytest.mark.promise(8)
@pytest.mark.timeout(600)
def test_a_hundred_kills_while_it_writes(tmp_path: Path, promise: Recorder) -> None:
    records, damage = kill_rounds(tmp_path, 100, seed=2)
    print(f"100 kills: {records} records sound, {damage} torn")
    promise(8, "killed 100 times while it writes: rounds without a wrong record", 100, exactly=100)


def test_files_that_were_cut_and_flipped_anywhere_give_back_nothing_wrong(tmp_path: Path) -> None:
    killed_while_writing(tmp_path, 0, 60)
    whole, _ = sound(tmp_path)
    chance = random.Random(3)
    for _ in range(40):
        path = chance.choice(sorted(tmp_path.glob("*.segment")))
        data = bytearray(path.read_bytes())
        if len(data) and chance.random() < 0.7:
            at = chance.randrange(len(data))
            data[at] ^= 1 << chance.randrange(8)
        else:
            del data[chance.randrange(len(data) + 1) :]
        path.write_bytes(bytes(data))
        numbers, _ = sound(tmp_path)  # fails for a wrong one
        assert numbers <= whole
    assert len(numbers) < len(whole)
