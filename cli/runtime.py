"""Where running stacks of this user leave word: a private folder with one file each. Knows paths, no services."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from fabric.errors import StartError


@dataclass(frozen=True, slots=True)
class StackRecord:
    """A running stack, as `deepinfer chat` finds it and as --ready-file tells it.

    pid, started: the process of `deepinfer up` and its start in Unix seconds, which tell it from a later process with
    the same number. http, grpc: the gateway's host:port. pids: process of each service. transport: how KV moves.
    """

    pid: int
    started: float
    http: str
    grpc: str
    model: str
    log_dir: str
    pids: dict[str, int]
    addresses: dict[str, str]
    transport: str = ""

    @property
    def alive(self) -> bool:
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1.0
        except psutil.Error:
            return False


def folder() -> Path:
    """The private folder, made when missing. Raises StartError when it cannot be made or somebody else owns it."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    path = base / f"deepinfer-{os.getuid()}"
    fix = "set XDG_RUNTIME_DIR or TMPDIR to a folder of yours that is writable"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"cannot make {path}: {error.strerror}", field="XDG_RUNTIME_DIR", fix=fix) from error
    if path.stat().st_uid != os.getuid():
        raise StartError(f"{path} belongs to another user", field="XDG_RUNTIME_DIR", fix=fix)
    return path


def write_atomically(path: Path, record: StackRecord) -> None:
    """Writes the record so that a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(asdict(record), indent=2) + "\n")
    scratch.replace(path)


def stacks(place: Path) -> list[StackRecord]:
    """Running stacks, newest first."""
    records = (_read(path) for path in place.glob("stack-*.json"))
    return sorted((record for record in records if record and record.alive), key=lambda r: -r.started)


def require_own(running: Iterable[StackRecord], log_dir: Path | None, ready_file: Path | None) -> None:
    """Removes what an ended stack left at `ready_file`, which would tell of nothing that runs.

    Raises StartError where one of the running stacks logs to `log_dir` or has left word at `ready_file`.
    """
    for stack in running:
        if log_dir is not None and Path(stack.log_dir) == log_dir.resolve():
            raise StartError(f"process {stack.pid} logs to {log_dir}", field="--log-dir", fix="name another folder")
    told = _read(ready_file) if ready_file is not None else None
    if ready_file is not None and told is not None:
        if told.alive:
            message = f"process {told.pid} has left word at {ready_file}"
            raise StartError(message, field="--ready-file", fix="name another file")
        ready_file.unlink(missing_ok=True)


def sweep(place: Path) -> None:
    """Removes what stacks that were killed left behind. Before a stack of this process exists: containers reuse ids."""
    for path in place.glob("stack-*"):
        pid = path.name.removeprefix("stack-").split(".")[0]
        if pid.isdigit() and (int(pid) == os.getpid() or not psutil.pid_exists(int(pid))):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _read(path: Path) -> StackRecord | None:
    try:
        return StackRecord(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None  # being removed, or written by another version
