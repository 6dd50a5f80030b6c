"""The folder of compiled kernels: one process compiles while others wait, and old folders go. Knows no operator."""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO

LOCK, DONE = "compiling.lock", "compiled-"
_PREFIX, _NEWEST, _DAY_S = "kernels-", 2, 86_400.0
_LOOK_S = 0.2

Tell = Callable[[str], None]
"""Told in a few words what takes long, before it does."""


def folder_of(kernels: str) -> Path | None:
    """Where the kernels called so keep what they compile; None if they compile nothing or keep it themselves."""
    if kernels != "cpu":
        return None
    import_module("kernels.cpu")  # chooses the folder
    return Path(import_module("numba").config.CACHE_DIR)


@contextmanager
def compiled_once(folder: Path | None, what: str, tell: Tell, patience_s: float = 900.0) -> Iterator[None]:
    """The body compiles kernels and may find them compiled: of the processes that run it at a time, only one compiles.

    Several that compiled the same would each take as long as one alone, times their number where they share cores.
    `what` names what the body compiles; once it has ended well, later ones on this kind of processor run without
    waiting for each other. Whoever has waited for `patience_s` goes on by itself: a lock is there to save time.
    """
    lock = _opened(folder, tell) if folder is not None else None
    if folder is None or lock is None:
        yield
        return
    processor = import_module("llvmlite.binding").get_host_cpu_name()
    done = folder / f"{DONE}{what}-{processor}"
    with lock:
        _wait_for_turn(lock, done, tell, patience_s)
        yield
        done.touch()
    os.utime(folder)


def sweep(folder: Path | None, now: float) -> list[Path]:
    """Removes compiled kernels of older versions beside `folder`, and says which.

    The two used last stay, and those used within a day: another checkout or an older stack may still run. `now` in
    unix seconds. A folder that the user named, whose neighbours are not ours, is left alone.
    """
    if folder is None or not folder.name.startswith(_PREFIX):
        return []
    others = [path for path in folder.parent.glob(f"{_PREFIX}*") if path != folder and path.is_dir()]
    by_use = sorted(((_used_at(path), path) for path in others), reverse=True)
    old = [path for used_at, path in by_use[_NEWEST - 1 :] if now - used_at > _DAY_S]
    for path in old:
        shutil.rmtree(path, ignore_errors=True)
    return old


def _used_at(path: Path) -> float:
    """Unix seconds; the distant future for a folder that another process sweeps at this moment."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def _opened(folder: Path, tell: Tell) -> IO[bytes] | None:
    """The lock file; None where the folder cannot be written, which costs time at every start and nothing else."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / LOCK).open("ab")
    except OSError as error:
        tell(f"compiled kernels cannot be kept in {folder}: {error.strerror}; set XDG_CACHE_HOME to a writable folder")
        return None


def _wait_for_turn(lock: IO[bytes], done: Path, tell: Tell, patience_s: float) -> None:
    """Takes the lock, which ends with its file or its process, unless `done` shows that nothing is left to compile."""
    ends, waited = time.monotonic() + patience_s, False
    while not (done.exists() or _taken(lock.fileno())) and time.monotonic() < ends:
        if not waited:
            tell("another process compiles the kernels: waiting for it")
        waited = True
        time.sleep(_LOOK_S)
    if done.exists():
        fcntl.flock(lock, fcntl.LOCK_UN)
    else:
        tell("compiling the kernels, once for this version")


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
