"""A kvstore's disk tier on a file system that is made for it: full, or read-only. Run it in a mount namespace.

`python -m tests.support.tight_disk full|readonly FOLDER`; says what it found as JSON. Nothing here is simulated.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np

from fabric.errors import StartError
from fabric.lifecycle import background
from services.kvstore.nvme import tier as nvme_tier
from services.kvstore.nvme.files import SegmentFiles
from services.kvstore.nvme.jobs import Wanted
from services.kvstore.nvme.tier import NvmeTier
from tests.support.segment_writer import SEGMENT_BYTES, payload, record

RECORDS = 120
DISK = "1m"  # about 30 records


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[NvmeTier]:
    """A tier that believes that it has 1 GiB."""
    tier = NvmeTier(SegmentFiles(folder, SEGMENT_BYTES, direct=False), 1 << 30, time.time, 1 << 30)
    try:
        async with background(tier.run(), "nvme"):
            yield tier
    finally:
        tier.close()


async def write(tier: NvmeTier, numbers: range) -> None:
    for number in numbers:
        tier.offer(*record(number), lambda: None)
        async with asyncio.timeout(20.0):
            await tier.drained()


async def sound(tier: NvmeTier, numbers: range) -> tuple[int, int]:
    """Records that come back, and how many of them are wrong."""
    right = wrong = 0
    for number in numbers:
        expected = payload(number)
        target = np.zeros(len(expected), np.uint8)
        (found,) = await tier.fetch([Wanted(record(number)[0].id, len(target), target)])
        if found is not None:
            right, wrong = right + bool((target == expected).all()), wrong + bool((target != expected).any())
    return right, wrong


async def _full(folder: Path) -> dict[str, object]:
    nvme_tier._REST_S = 0.0
    async with opened(folder) as tier:
        await write(tier, range(RECORDS))
        right, wrong = await sound(tier, range(RECORDS))
        last, _ = await sound(tier, range(RECORDS - 10, RECORDS))
        return {"right": right, "wrong": wrong, "last": last, "held": len(tier), **asdict(tier.counts)}


async def _written(folder: Path) -> None:
    async with opened(folder) as tier:
        await write(tier, range(10))


def full(folder: Path) -> dict[str, object]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", folder], check=True)
    return asyncio.run(_full(folder))


def readonly(folder: Path) -> dict[str, object]:
    asyncio.run(_written(folder))
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
    try:
        SegmentFiles(folder, SEGMENT_BYTES, direct=False).close()
    except StartError as error:
        return {"refused": str(error), "field": error.field}
    return {"refused": ""}


if __name__ == "__main__":
    case = {"full": full, "readonly": readonly}[sys.argv[1]]
    print(json.dumps(case(Path(sys.argv[2]))))
