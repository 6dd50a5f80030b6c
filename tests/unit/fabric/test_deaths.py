"""A death is believed on a kernel's word alone; what the dead had under way is waited for."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fabric.deaths import Deaths, Incarnation, Vigil
from fabric.discovery import MemberInfo
from fabric.errors import StartError
from fabric.processes import ProcessId, claim_name, is_gone, this_process
from tests.support.procs import Process

OLD = ProcessId("boot@a", "net:1", "pid:1", 40, 1000)
WRITER = Incarnation("p", 5, OLD.pack())
SLEEPER = [sys.executable, "-c", "import time; print('{}', flush=True); time.sleep(60)"]


def member(epoch: int, process: ProcessId | None) -> MemberInfo:
    return MemberInfo("prefill", "p", "h:1", epoch, process=process.pack() if process else "")


def proven(*members: MemberInfo, writer: Incarnation = WRITER) -> bool:
    deaths = Deaths(lambda process: False)
    deaths.listed(members)
    return deaths.proven(writer)


def test_a_successor_that_holds_the_name_on_the_same_host_is_a_proof() -> None:
    assert proven(member(6, replace(OLD, pid=41, started=2000)))
    assert proven(member(6, replace(OLD, pids="pid:2")))  # a container that was started again


@pytest.mark.parametrize(
    "members",
    [
        (),  # its lease ended: it may be frozen
        (member(5, OLD),),
        (member(6, OLD),),  # the same process opened again
        (member(4, replace(OLD, pid=41)),),
        (member(6, None),),
        (member(6, replace(OLD, kernel="boot@b", pid=41)),),  # another host: nobody keeps two from having one name
        (member(6, replace(OLD, network="net:2", pid=41)),),
    ],
)
def test_anything_less_is_none(members: tuple[MemberInfo, ...]) -> None:
    assert not proven(*members)


def test_a_writer_without_a_process_is_never_proven_dead() -> None:
    deaths = Deaths(lambda process: True)
    assert deaths.proven(WRITER)
    assert not deaths.proven(Incarnation("p", 5)) and not deaths.proven(Incarnation("p", 5, "x y"))


def test_our_kernel_tells_dead_from_frozen(tmp_path: Path) -> None:
    ours = this_process()
    assert ours is not None and not is_gone(ours)
    child = Process(SLEEPER, tmp_path / "log")
    try:
        child.json()
        stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        process = replace(ours, pid=child.pid, started=int(stat[19]))
        child.freeze()
        assert not is_gone(process)
        assert is_gone(replace(process, started=process.started - 1))  # the number was used again
        assert not is_gone(replace(process, kernel="other")) and not is_gone(replace(process, pids="pid:[1]"))
        child.signal(signal.SIGKILL)
        child.wait()
        assert is_gone(process)
        assert not is_gone(replace(process, kernel="other"))
    finally:
        child.close()


def test_a_name_is_held_until_its_process_is_gone(tmp_path: Path) -> None:
    name = f"prefill/{tmp_path.name}-{tmp_path.stat().st_ino}"
    claim = f"from fabric.processes import claim_name; claim_name({name!r}); print('{{}}', flush=True); input()"
    child = Process([sys.executable, "-c", claim], tmp_path / "log")
    try:
        child.json()
        with pytest.raises(StartError, match="runs on this host already"):
            claim_name(name)
        child.kill()
        claim_name(name)
        claim_name(name)
    finally:
        child.close()


def test_a_vigil_counts_only_time_in_which_we_ran() -> None:
    vigil = Vigil(linger_s=2.0, longest_step_s=1.0)
    assert vigil.step(0.0, ["a"]) == []
    assert vigil.step(100.0, ["a"]) == []  # we were frozen
    assert vigil.step(100.5, ["a", "b"]) == []
    assert vigil.step(101.0, ["a", "b"]) == ["a"]
    assert vigil.step(102.0, ["b"]) == []
    assert vigil.step(103.0, []) == []
    assert vigil.step(103.5, ["b"]) == []  # no longer proven, then again: from the start
