"""Checks of the machine itself: Python, cores, memory, limits, clock, GPU. Knows what the services ask of each."""

import ctypes
import os
import platform
import resource
import shutil
import subprocess
import time
from pathlib import Path

import psutil

from cli import cores
from cli.console import megabytes
from cli.doctor import Finding, Health

WANTED_MEMORY_BYTES = 4_000_000_000
LEAST_MEMORY_BYTES = 2_000_000_000
WANTED_FILES = 4096
WANTED_LOCKED_BYTES = 1 << 30
WANTED_SHARED_BYTES = 256 << 20
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised


def python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        return Finding(Health.FAIL, found, "run the stack on Linux: etcd, Redis and UCX come as Linux programs")
    return Finding(Health.OK, found)


def processors() -> Finding:
    count = cores.available()
    if count < 2:
        return Finding(Health.WARN, f"{count} core", "prefill and decode will share it: give the stack two or more")
    return Finding(Health.OK, f"{count} cores")


def memory() -> Finding:
    free = psutil.virtual_memory().available
    found = f"{megabytes(free)} available"
    if free < LEAST_MEMORY_BYTES:
        return Finding(Health.FAIL, found, "close other programs: the default stack takes up to 4 GB")
    if free < WANTED_MEMORY_BYTES:
        return Finding(Health.WARN, found, "the default stack may take up to 4 GB; lower --prefill and --decode")
    return Finding(Health.OK, found)


def shared_memory() -> Finding:
    """KV between processes of one machine goes through shared memory; container defaults of 64 MB are too small."""
    shared = Path("/dev/shm")  # noqa: S108
    size = shutil.disk_usage(shared).total if shared.is_dir() else 0
    if size < WANTED_SHARED_BYTES:
        return Finding(Health.WARN, megabytes(size), "start the container with --shm-size=1g")
    return Finding(Health.OK, megabytes(size))


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < WANTED_FILES:
        fix = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
        return Finding(Health.WARN, f"{soft} files at a time (hard limit {hard})", fix)
    return Finding(Health.OK, f"{soft} files at a time")


def locked_memory() -> Finding:
    """RDMA pins the memory it registers; CPU lanes do not."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(Health.OK, "unlimited")
    if soft < WANTED_LOCKED_BYTES:
        return Finding(Health.WARN, megabytes(soft), "for RDMA only: ulimit -l unlimited")
    return Finding(Health.OK, megabytes(soft))


def clock() -> Finding:
    if time.time() < Path(__file__).stat().st_mtime - 86_400:
        return Finding(Health.FAIL, time.strftime("%Y-%m-%d %H:%M"), "set the clock: it is behind the installed files")
    # Leases and deadlines travel as durations, so an unsynchronised clock costs readable logs, not answers.
    if ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)) == _TIME_ERROR:
        return Finding(Health.OK, "not synchronised (matters only for logs of several machines)")
    return Finding(Health.OK, "synchronised")


def gpu() -> Finding:
    program = shutil.which("nvidia-smi")
    if program is None:
        if Path("/dev/nvidiactl").exists():
            return Finding(Health.WARN, "a device, but no nvidia-smi", "install the driver's utilities")
        return Finding(Health.OK, "none: the CPU kernels serve")
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(Health.WARN, f"nvidia-smi does not answer: {error}", "restart the driver, or ignore the GPU")
    if done.returncode != 0:
        return Finding(Health.WARN, (done.stdout + done.stderr).strip()[:120], "mend the driver, or ignore the GPU")
    return Finding(Health.OK, "; ".join(done.stdout.split("\n")).strip("; "))


def scratch() -> Finding:
    """etcd's data, ready files and logs."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")  # noqa: S108
    free = shutil.disk_usage(base).free
    if free < 100_000_000:
        return Finding(Health.WARN, f"{megabytes(free)} free in {base}", "set XDG_RUNTIME_DIR to a folder with room")
    return Finding(Health.OK, f"{megabytes(free)} free in {base}")
