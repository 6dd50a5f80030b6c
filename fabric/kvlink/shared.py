"""Memory that other processes of this host can map: allocated here, named in a token, opened there. Knows no link.

A name is believed only if what it leads to is provably that memory: the same boot, the process that it names by number
and start, and behind its descriptor a memory file whose title has the name's nonce, sealed against shrinking.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import struct
import uuid
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from fabric.errors import InvalidArgument
from fabric.kvlink import pages
from fabric.kvlink.link import Bytes
from fabric.telemetry import logs

_log = logs.get("kvlink")
_NAME = struct.Struct("<16sIQIQ16s")
# A mapping of a file that shrinks would end its process: neither side maps one that can.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# Up to here all pages are given at once, wanted or not: huge ones take 0.1 s.
_AT_ONCE_BYTES = 1 << 30
_START_FIELD = 19  # of /proc/PID/stat, counted after the command's closing bracket


@dataclass(frozen=True, slots=True)
class SharedName:
    """Leads processes of the same boot to memory: its owner's number, start (ticks since boot) and descriptor."""

    boot: bytes
    pid: int
    started: int
    descriptor: int
    nbytes: int
    nonce: bytes

    @property
    def title(self) -> str:
        return f"deepinfer-{self.nonce.hex()}"

    def pack(self) -> bytes:
        return _NAME.pack(self.boot, self.pid, self.started, self.descriptor, self.nbytes, self.nonce)

    @staticmethod
    def unpack(packed: bytes) -> SharedName:
        """Raises InvalidArgument for bytes that are no name."""
        if len(packed) != _NAME.size:
            raise InvalidArgument(f"a name of shared memory has {_NAME.size} bytes, not {len(packed)}", field="region")
        return SharedName(*_NAME.unpack(packed))


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """Memory of this process under its name; the descriptor stays open as long as others may look for it."""

    name: SharedName
    memory: Bytes = field(repr=False)

    def close(self) -> None:
        """Nobody finds the memory any more; who mapped it keeps it."""
        os.close(self.name.descriptor)


@dataclass(frozen=True, slots=True, eq=False)
class Mapping:
    """Memory of another process, mapped here at `address`, to be written to or only read.

    `process` is its descriptor (pidfd), readable once it has ended.
    """

    memory: Bytes = field(repr=False)
    address: int
    process: int

    def is_over(self) -> bool:
        """Whether its owner has ended."""
        watch = select.poll()
        watch.register(self.process, select.POLLIN)
        return bool(watch.poll(0))

    def close(self) -> None:
        """The memory is unmapped when the last user of `memory` lets go of it."""
        os.close(self.process)


@cache
def boot() -> bytes:
    """Identity of this boot of the host, 16 bytes."""
    return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


def allocate(nbytes: int, touched: bool = True) -> Shared:
    """Zeroed memory under a name that nobody can guess; `touched`: the host has given all of its pages, as it has of
    memory that is not very large.

    Raises OSError where the host gives none.
    """
    nonce = secrets.token_bytes(16)
    pid = os.getpid()
    unnamed = SharedName(boot(), pid, _started(pid), 0, nbytes, nonce)
    descriptor = os.memfd_create(unnamed.title, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        memory = pages.map_file(descriptor, nbytes, writable=True)
        if touched or nbytes <= _AT_ONCE_BYTES:
            pages.give(memory)
    except BaseException:
        os.close(descriptor)
        raise
    name = SharedName(unnamed.boot, pid, unnamed.started, descriptor, nbytes, nonce)
    return Shared(name, memory)


def open_mapping(name: SharedName, writable: bool = True) -> Mapping | None:
    """Maps what the name leads to; None where it does not lead to exactly that memory, or may not be opened."""
    if name.boot != boot():
        return None
    try:
        process = os.pidfd_open(name.pid)
    except (OSError, OverflowError):
        return None
    try:
        memory = _opened(name, writable)
    except (OSError, ValueError, OverflowError) as error:
        _log.info("memory of a peer not mapped", reason=type(error).__name__)
        memory = None
    if memory is None:
        os.close(process)
        return None
    return Mapping(memory, memory.ctypes.data, process)


def _opened(name: SharedName, writable: bool) -> Bytes | None:
    """Raises OSError or ValueError for what cannot be opened. The process is held by its descriptor meanwhile."""
    path, title = Path(f"/proc/{name.pid}/fd/{name.descriptor}"), Path(f"/memfd:{name.title} (deleted)")
    if _started(name.pid) != name.started or path.readlink() != title:
        return None
    descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # The owner may have put another file behind its number since it was read: what was opened counts.
        if Path(f"/proc/self/fd/{descriptor}").readlink() != title or os.fstat(descriptor).st_size != name.nbytes:
            return None
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return None
        return pages.map_file(descriptor, name.nbytes, writable)
    finally:
        os.close(descriptor)


def _started(pid: int) -> int:
    """When a process started, in ticks since boot: a number that is used again names another process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_START_FIELD])
