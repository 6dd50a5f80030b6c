"""The folder of compiled kernels: one compiles while others wait, and old versions go."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kernels import cache

NOW = 1_800_000_000.0
DAY = 86_400.0


class Workers:
    """Threads that enter `compiled_once` and stay until they are let go."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.inside, self.told = folder, threading.Semaphore(0), list[str]()
        self.waiting, self.let_go = threading.Event(), threading.Event()

    def start(self, fails: bool = False) -> threading.Thread:
        thread = threading.Thread(target=self._run, args=(fails,))
        thread.start()
        return thread

    def _run(self, fails: bool) -> None:
        try:
            with cache.compiled_once(self.folder, "v4", self._tell, patience_s=60.0):
                self.inside.release()
                assert self.let_go.wait(30)
                if fails:
                    raise OSError("the checkpoint is broken")
        except OSError:
            pass

    def _tell(self, text: str) -> None:
        self.told.append(text)
        if "waiting" in text:
            self.waiting.set()


@pytest.mark.parametrize("fails", [False, True])
def test_one_compiles_while_another_waits_and_then_goes_on(tmp_path: Path, fails: bool) -> None:
    workers = Workers(tmp_path / "kernels-1")
    first = workers.start(fails)
    assert workers.inside.acquire(timeout=30)
    second = workers.start()
    assert workers.waiting.wait(30)
    assert not workers.inside.acquire(blocking=False)
    workers.let_go.set()
    assert workers.inside.acquire(timeout=30)
    for thread in (first, second):
        thread.join(30)
    compiles = sum("compiling" in text for text in workers.told)
    assert compiles == (2 if fails else 1)  # after a failure the next one has it all to do


def test_what_is_compiled_needs_no_turn(tmp_path: Path) -> None:
    with cache.compiled_once(tmp_path, "v4", lambda text: None):
        pass
    workers = Workers(tmp_path)
    threads = [workers.start() for _ in range(3)]
    assert all(workers.inside.acquire(timeout=30) for _ in threads)
    workers.let_go.set()
    for thread in threads:
        thread.join(30)
    assert workers.told == []


def test_patience_ends(tmp_path: Path) -> None:
    workers = Workers(tmp_path)
    holder = workers.start()
    assert workers.inside.acquire(timeout=30)
    with cache.compiled_once(tmp_path, "v4", lambda text: None, patience_s=0.0):
        workers.let_go.set()
    holder.join(30)


def test_a_folder_that_cannot_be_written_costs_time_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    told: list[str] = []
    with cache.compiled_once(tmp_path / "file" / "kernels-1", "v4", told.append):
        told.append("ran")
    assert "XDG_CACHE_HOME" in told[0] and told[1:] == ["ran"]


def version(root: Path, name: str, age_s: float) -> Path:
    folder = root / name
    folder.mkdir()
    (folder / "kernel.nbi").write_bytes(b"x")
    os.utime(folder, (NOW - age_s, NOW - age_s))
    return folder


def test_the_two_versions_used_last_stay(tmp_path: Path) -> None:
    current = version(tmp_path, "kernels-now", 0)
    before = version(tmp_path, "kernels-before", 9 * DAY)
    older = [version(tmp_path, f"kernels-{age}", age * DAY) for age in (10, 20)]
    recent = version(tmp_path, "kernels-other-checkout", DAY / 2)
    other = version(tmp_path, "models", 90 * DAY)
    assert set(cache.sweep(current, NOW)) == {before, *older}
    assert [path for path in (current, recent, other) if not path.is_dir()] == []
    assert [path for path in (before, *older) if path.exists()] == []
    assert cache.sweep(current, NOW) == []


def test_the_version_before_stays_where_no_other_was_used_since(tmp_path: Path) -> None:
    current, before = version(tmp_path, "kernels-now", 0), version(tmp_path, "kernels-before", 9 * DAY)
    assert cache.sweep(current, NOW) == [] and before.is_dir()


def test_a_folder_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    mine = version(tmp_path, "numba", 0)
    version(tmp_path, "kernels-1", 50 * DAY)
    version(tmp_path, "kernels-2", 50 * DAY)
    assert cache.sweep(mine, NOW) == [] and cache.sweep(None, NOW) == []
