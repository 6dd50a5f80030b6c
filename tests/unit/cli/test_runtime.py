"""Word that running stacks leave."""

import os
import stat
from dataclasses import replace

import psutil
import pytest

from cli import runtime
from fabric.errors import StartError

HERE = runtime.StackRecord(
    pid=os.getpid(),
    started=psutil.Process().create_time(),
    http="127.0.0.1:8000",
    grpc="127.0.0.1:7000",
    model="nano",
    log_dir="logs",
    pids={"gateway": 1},
    addresses={"gateway": "127.0.0.1:7000"},
)


def test_a_written_stack_is_found_newest_first(tmp_path):
    older = replace(HERE, started=HERE.started - 0.5)
    runtime.write_atomically(tmp_path / "stack-1.json", older)
    runtime.write_atomically(tmp_path / "stack-2.json", HERE)
    assert runtime.stacks(tmp_path) == [HERE, older]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["stack-1.json", "stack-2.json"]


def test_a_stack_whose_process_number_now_belongs_to_another_is_not_found(tmp_path):
    runtime.write_atomically(tmp_path / "stack-1.json", replace(HERE, started=HERE.started - 3600))
    assert runtime.stacks(tmp_path) == []


def test_a_file_of_another_version_is_not_a_stack(tmp_path):
    (tmp_path / "stack-1.json").write_text('{"colour": "blue"}')
    (tmp_path / "stack-2.json").write_text("{")
    assert runtime.stacks(tmp_path) == []


def test_sweep_removes_what_dead_stacks_left_and_nothing_else(tmp_path):
    dead = 2**22 + 1  # above the kernel's largest process number
    (tmp_path / f"stack-{dead}").mkdir()
    (tmp_path / f"stack-{dead}" / "redis.conf").write_text("secret")
    (tmp_path / f"stack-{dead}.json").write_text("{}")
    (tmp_path / f"stack-{os.getpid()}").mkdir()  # of an earlier process with our number
    (tmp_path / f"stack-{os.getppid()}").mkdir()
    (tmp_path / "other").write_text("")
    runtime.sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", f"stack-{os.getppid()}"]


def test_two_stacks_share_neither_their_word_nor_their_logs(tmp_path):
    word, logs = tmp_path / "ready.json", tmp_path / "logs"
    mine = replace(HERE, log_dir=str(logs))
    runtime.write_atomically(word, mine)
    with pytest.raises(StartError, match=f"process {os.getpid()} has left word") as caught:
        runtime.require_own([], None, word)
    assert caught.value.field == "--ready-file" and word.exists()
    with pytest.raises(StartError, match="logs to") as caught:
        runtime.require_own([mine], logs, None)
    assert caught.value.field == "--log-dir"
    runtime.require_own([mine], tmp_path / "others", tmp_path / "other.json")


def test_the_word_of_a_stack_that_ended_is_removed_before_another_starts(tmp_path):
    word, other = tmp_path / "ready.json", tmp_path / "notes.txt"
    runtime.write_atomically(word, replace(HERE, started=HERE.started - 3600))
    other.write_text("not ours")
    for file in (word, other):
        runtime.require_own([], None, file)
    assert not word.exists() and other.exists()


def test_the_folder_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert stat.S_IMODE(runtime.folder().stat().st_mode) == 0o700


def test_a_private_folder_that_cannot_be_made_names_the_variable_that_moves_it(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    with pytest.raises(StartError) as caught:
        runtime.folder()
    assert caught.value.field == "XDG_RUNTIME_DIR" and "TMPDIR" in caught.value.fix
