"""Pages of memory that processes share: where it is mapped, and huge pages for it. Knows files and addresses alone.

Shared memory gets pages of 4 KiB, wherever there is one: after a while on a busy host each lies somewhere else, and
copies take longer. Huge pages do not age, come in a fifth of the time, and a peer maps each with one fault. The kernel
gives them to shared memory only where it is asked in so many words, and where file and address are aligned alike.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from fabric.kvlink.link import Bytes

_POPULATE_WRITE, _COLLAPSE = 23, 25  # of linux/mman.h, since Linux 5.14 and 6.1; the mmap module does not name them
_NORESERVE, _FIXED = 0x4000, 0x10
_HUGE_BYTES_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_HUGE_BYTES = 2 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def map_file(descriptor: int, nbytes: int, writable: bool) -> Bytes:
    """All of a file, shared, uint8 [nbytes], at an address where huge pages fit; unmapped with its last user.

    Raises OSError where the host does not map it.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    # Room for it, which unmaps everything in its end. Of its own it has no page.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    room = np.frombuffer(mmap.mmap(-1, nbytes + huge_bytes(), flags=flags, prot=protection), np.uint8)
    shift = -room.ctypes.data % huge_bytes()
    memory = room[shift : shift + nbytes]
    address = memory.ctypes.data
    if _libc.mmap(address, nbytes, protection, mmap.MAP_SHARED | _FIXED, descriptor, 0) != address:
        raise _error()
    with suppress(OSError):  # a host without huge pages
        _advise(address, nbytes, mmap.MADV_HUGEPAGE)
    return memory


def give(memory: Bytes) -> None:
    """Has the host give all pages of memory from `map_file`, huge ones where it can; what is there stays.

    Raises OSError where the host has no more: a page that is missing later would end the process.
    """
    start, huge = memory.ctypes.data, huge_bytes()
    whole = memory.nbytes // huge * huge
    with suppress(OSError):  # too old, not allowed, or no huge page left
        for first in range(start, start + whole, huge):
            _advise(first, mmap.PAGESIZE, _POPULATE_WRITE)  # one page each: empty ones are not made huge
        _advise(start, whole, _COLLAPSE)
    try:
        _advise(start, memory.nbytes, _POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        memory[:: mmap.PAGESIZE] |= 0  # a kernel that knows no better


@cache
def huge_bytes() -> int:
    """Size of a huge page of this host."""
    with suppress(OSError, ValueError):
        return int(_HUGE_BYTES_FILE.read_text())
    return _HUGE_BYTES


def _advise(address: int, nbytes: int, advice: int) -> None:
    if nbytes and _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice):
        raise _error()


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
