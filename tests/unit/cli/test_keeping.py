"""The folder of `--kv-dir` is one stack's at a time, and nobody's after it was killed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli import keeping
from fabric.errors import StartError

HOLD = """
import sys
from pathlib import Path
from cli import keeping
with keeping.held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_stack_is_refused_at_once_with_the_option_and_the_first_ones_process(tmp_path: Path) -> None:
    with holder(tmp_path) as other, pytest.raises(StartError) as caught, keeping.held(tmp_path):
        pass
    error = caught.value
    assert (
        error.field == "--kv-dir" and error.message == f"process {other.pid} keeps its KV in {tmp_path}" and error.fix
    )


def test_a_killed_stack_holds_nothing(tmp_path: Path) -> None:
    with holder(tmp_path) as other:
        other.kill()
        other.wait()
        with keeping.held(tmp_path):
            assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_what_was_left_can_be_held_again(tmp_path: Path) -> None:
    for _ in range(2):
        with keeping.held(tmp_path):
            pass


def test_the_folder_of_a_kvstore_that_runs_by_itself_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "_LAST_BREATH_S", 0.1)
    keeping.blocks(tmp_path).mkdir()
    with (keeping.blocks(tmp_path) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StartError, match="another process keeps its KV") as caught, keeping.held(tmp_path):
            pass
    assert caught.value.field == "--kv-dir"
    with keeping.held(tmp_path):
        pass


def test_a_folder_that_cannot_be_locked_is_told_with_the_option(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(StartError, match="cannot be locked") as caught, keeping.held(tmp_path):
        pass
    assert caught.value.field == "--kv-dir" and caught.value.fix
