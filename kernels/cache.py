"""The folder of compiled kernels: one process compiles while others wait, and old folders go. Knows no operator."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

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
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    processor = import_module("llvmlite.binding").get_host_cpu_name()
    done = folder / f"{DONE}{what}-{processor}"
    with _turn(folder / LOCK, done, tell, patience_s):
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
    by_use = sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)
    old = [path for path in by_use[_NEWEST - 1 :] if now - path.stat().st_mtime > _DAY_S]
    for path in old:
        shutil.rmtree(path, ignore_errors=True)  # two processes may sweep at a time
    return old


@contextmanager
def _turn(lock: Path, done: Path, tell: Tell, patience_s: float) -> Iterator[None]:
    """Holds the lock, unless `done` shows that there is nothing left to compile. Ends with its process, too."""
    with lock.open("ab") as file:
        ends, waited = time.monotonic() + patience_s, False
        while not (done.exists() or _taken(file.fileno())) and time.monotonic() < ends:
            if not waited:
                tell("another process compiles the kernels: waiting for it")
            waited = True
            time.sleep(_LOOK_S)
        if not done.exists():
            tell("compiling the kernels, once for this version")
        else:
            fcntl.flock(file, fcntl.LOCK_UN)
        yield


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
