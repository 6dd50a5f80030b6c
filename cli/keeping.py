"""Keeping: the folder of `--kv-dir`, which outlives a stack. Knows what a later stack needs to find there."""

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fabric.errors import StartError

_SALT_FILE = "salt"
_BLOCKS = "blocks"
_LOCK = "lock"  # of a stack; the kvstore has one of the same name in its own folder
_LAST_BREATH_S = 3.0  # of a kvstore whose stack was killed
_LOOK_S = 0.05


def blocks(folder: Path) -> Path:
    """Where the kvstore keeps its records: a folder of its own, for it trusts every segment in there."""
    return folder / _BLOCKS


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keeps other stacks away from the folder until it is left; the kernel gives it back where this process is killed.

    Raises:
        StartError: another stack, or a kvstore alone, holds it, or it cannot be locked; names the process if it can.
    """
    lock = _taken(folder, folder / _LOCK, os.O_RDWR | os.O_CREAT, patience_s=0.0)
    try:
        with suppress(FileNotFoundError):  # the folder of blocks is the kvstore's to make
            os.close(_taken(folder, blocks(folder) / _LOCK, os.O_RDWR, _LAST_BREATH_S))
        os.truncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(lock)


def _taken(folder: Path, path: Path, flags: int, patience_s: float) -> int:
    """The descriptor of a lock file. Raises StartError as `held`, FileNotFoundError where there is no such file."""
    lock = None
    try:
        lock = os.open(path, flags, 0o600)
        _lock(lock, patience_s)
    except FileNotFoundError:
        raise
    except OSError as error:
        holder = os.read(lock, 32).decode(errors="replace").strip() if lock is not None else ""
        if lock is not None:
            os.close(lock)
        if not isinstance(error, BlockingIOError):
            fix = "name a folder of your own, on a file system with locks"
            raise StartError(f"{path} cannot be locked: {error.strerror}", field="--kv-dir", fix=fix) from error
        who = f"process {holder}" if holder.isdecimal() else "another process"
        fix = "end it, or name another folder"
        raise StartError(f"{who} keeps its KV in {folder}", field="--kv-dir", fix=fix) from None
    return lock


def _lock(descriptor: int, patience_s: float) -> None:
    """Raises BlockingIOError where somebody else has it for so long."""
    ends = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= ends:
                raise
            time.sleep(_LOOK_S)


def salt(folder: Path) -> str:
    """The secret that tenants' keys are derived from, made by the first stack: another one would find nothing.

    Raises:
        StartError: it can be read by others, or not at all.
    """
    path = folder / _SALT_FILE
    try:
        _make(path)
        if path.stat().st_mode & 0o077:
            raise StartError(f"others may read {path}", field="--kv-dir", fix=f"chmod 600 {path}, or delete it")
        found = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        fix = "name a folder of your own"
        raise StartError(f"{path} cannot be read: {error}", field="--kv-dir", fix=fix) from error
    if not found:
        raise StartError(f"{path} is empty", field="--kv-dir", fix="delete it: what was stored is then found no more")
    return found


def _make(path: Path) -> None:
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(secrets.token_urlsafe(24))
            file.flush()
            os.fsync(descriptor)
