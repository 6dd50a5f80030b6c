"""Touching: has the host give all pages of a memory before they are needed. Knows addresses; changes no byte.

The first write to a page of memory takes several times as long as the next one: whoever comes first after a start would
pay for it. So pages are asked for in the background, some at a time, at a quarter of a core.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import time

import numpy as np
import numpy.typing as npt

from fabric.telemetry import logs
from services.worker.together import settled

Bytes = npt.NDArray[np.uint8]
_log = logs.get("start")
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of linux/mman.h, since Linux 5.14
_STEP_BYTES = 16 << 20
_RESTS = 3.0  # times as long as a step took
_libc = ctypes.CDLL(None, use_errno=True)


async def touch(memory: Bytes) -> None:
    """Returns when all pages are there, or when the host gives no more: then each comes when it is used."""
    started = time.monotonic()
    for start in range(0, len(memory), _STEP_BYTES):
        began = time.monotonic()
        try:
            await settled(asyncio.to_thread(populate, memory[start : start + _STEP_BYTES]))
        except OSError as error:
            _log.info("memory is not touched beforehand", error=error.strerror, touched_bytes=start)
            return
        await asyncio.sleep(_RESTS * (time.monotonic() - began))
    _log.info("memory touched", bytes=len(memory), seconds=round(time.monotonic() - started, 3))


def populate(memory: Bytes) -> None:
    """Has the host give the pages of `memory` as if each was written to; their content stays. Raises OSError."""
    start = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    length = memory.ctypes.data + len(memory) - start
    if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _POPULATE_WRITE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
