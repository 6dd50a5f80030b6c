"""The C heap while a model is loaded: large buffers go back to the system at once. Knows glibc alone; others are left.

glibc keeps freed buffers of up to 32 MiB for reuse once it has seen one freed, and a small allocation above them keeps
them for good: measured, a load of 1.5 GB of weights then takes up to 3.4 GB.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_LOADING = 256 << 10
_MOST = 32 << 20  # where glibc's own adjustment ends


@contextmanager
def large_buffers_returned() -> Iterator[None]:
    """Inside, buffers from 256 KiB are mapped and unmapped one by one; afterwards glibc is as after its adjustment."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _LOADING)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _MOST)
        mallopt(_TRIM_THRESHOLD, 2 * _MOST)
