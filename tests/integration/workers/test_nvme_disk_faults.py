"""A disk that is full or read-only costs hits and never a wrong byte, and the tier goes on (promise 8)."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.kvstore.nvme import tier as nvme_tier
from tests.support import procs
from tests.support.segment_writer import SEGMENT_BYTES
from tests.support.tight_disk import opened, sound, write

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def in_namespace(case: str, folder: Path) -> dict[str, Any]:
    """What `tight_disk` found on a file system of its own; skips where this machine allows none."""
    if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace without privileges here")
    command = [*NAMESPACE, sys.executable, "-m", "tests.support.tight_disk", case, str(folder)]
    done = subprocess.run(command, cwd=procs.ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])  # its log comes before
    return found


@contextmanager
def files_end_at(nbytes: int) -> Iterator[None]:
    """No file of this process grows beyond that: the write that would is cut short, the next one refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_used_as_far_as_it_goes_and_the_newest_records_are_there(tmp_path: Path) -> None:
    found = in_namespace("full", tmp_path)
    assert found["wrong"] == 0 and found["right"] == found["held"] > 10
    assert found["failed"] > 0 and found["removed"] > 0  # it was full, and what was there made room
    assert found["last"] >= 5, "a full disk takes new records in the place of old ones"


def test_a_read_only_disk_is_refused_by_name_at_the_start(tmp_path: Path) -> None:
    found = in_namespace("readonly", tmp_path)
    assert "Read-only" in found["refused"] and found["field"] == "nvme_dir"


async def test_a_record_that_was_cut_short_is_none_and_the_next_ones_are_whole(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(nvme_tier, "_REST_S", 0.0)
    async with opened(tmp_path) as tier:
        numbers = iter(range(20))
        with files_end_at(SEGMENT_BYTES // 2):
            while not tier.counts.failed:
                number = next(numbers)
                await write(tier, range(number, number + 1))
        assert tier.counts.written == number > 1
        assert await sound(tier, range(20)) == (number, 0)
        await write(tier, range(20, 24))
        assert await sound(tier, range(20, 24)) == (4, 0)
    async with opened(tmp_path) as tier:  # what was cut short is counted by the next start, and found by nobody
        await write(tier, range(30, 31))
        assert tier.counts.damaged > 0 and (await sound(tier, range(24)))[1] == 0


async def test_a_disk_that_becomes_read_only_serves_what_it_has_and_holds_nothing_in_dram(
    tmp_path: Path, monkeypatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(nvme_tier, "_REST_S", 0.0)
    async with opened(tmp_path) as tier:
        await write(tier, range(40))
        with monkeypatch.context() as patch:
            for call in ("pwritev", "unlink", "fdatasync"):
                patch.setattr(os, call, refuse)
            tier.capacity = tier.used // 2  # it wants to remove segments, and cannot
            await write(tier, range(100, 120))
            assert tier.counts.failed == 20 and tier.waiting_bytes == 0
            right, wrong = await sound(tier, range(40))
            assert wrong == 0 and 0 < right == len(tier)
        await write(tier, range(100, 120))
        assert (await sound(tier, range(100, 120)))[0] > 10
