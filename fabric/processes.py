"""Processes: which process of which host an incarnation is, and whether it is gone. Knows /proc, no service."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from blake3 import blake3

from fabric.errors import StartError

_PROC = Path("/proc")
_FIELDS = 5
_claims: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, once and for all: a number that the system uses again comes with another start.

    kernel: one boot of one named host. network, pids: its namespaces there. started: clock ticks after the boot.
    """

    kernel: str
    network: str
    pids: str
    pid: int
    started: int

    def pack(self) -> str:
        return " ".join((self.kernel, self.network, self.pids, str(self.pid), str(self.started)))

    @staticmethod
    def unpack(packed: str) -> ProcessId | None:
        """None for text that names no process: its owner could not tell, or is of another version."""
        parts = packed.split(" ")
        if len(parts) != _FIELDS or not (parts[3].isdecimal() and parts[4].isdecimal()):
            return None
        return ProcessId(parts[0], parts[1], parts[2], int(parts[3]), int(parts[4]))


@cache
def this_process() -> ProcessId | None:
    """Who we are; None where the system does not tell, which costs proofs of death and nothing else."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        network, pids = (str((_PROC / "self/ns" / kind).readlink()) for kind in ("net", "pid"))
        return ProcessId(f"{boot}@{os.uname().nodename}", network, pids, os.getpid(), _stat(os.getpid())[1])
    except (OSError, ValueError, IndexError):
        return None


def is_gone(process: ProcessId) -> bool:
    """Whether a process of this host has ended, memory and sockets included. False wherever that cannot be seen."""
    here = this_process()
    if here is None or (here.kernel, here.pids) != (process.kernel, process.pids):
        return False
    try:
        os.kill(process.pid, 0)  # /proc may hide what is there; this does not
    except ProcessLookupError:
        return True
    except OSError:
        pass
    try:
        ended, started = _stat(process.pid)
    except (OSError, ValueError, IndexError):
        return False
    return ended or started != process.started


def claim_name(name: str) -> None:
    """Takes a name on this host's network until this process ends: the kernel gives it back, not we.

    Hence a later process that holds the name proves that an earlier holder is gone.

    Raises:
        StartError: another process holds it.
    """
    if name in _claims:
        return
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(b"\0deepinfer-" + blake3(name.encode()).hexdigest()[:32].encode())
    except OSError as error:
        claim.close()
        raise StartError(
            f"{name!r} runs on this host already", field="instance", fix="end it, or give each worker its own name"
        ) from error
    _claims[name] = claim.detach()  # open as long as we are


def _stat(pid: int) -> tuple[bool, int]:
    """Whether all its threads have ended, and when it started."""
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    state, threads, started = fields[0], int(fields[17]), int(fields[19])
    return state in "ZX" and threads <= 1, started
