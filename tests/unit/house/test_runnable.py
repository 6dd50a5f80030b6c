"""Whatever can be run as a command says what it does, and refuses what it does not know, before it does anything."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("bench", "cli", "engine", "examples", "kernels", "models", "scripts", "services")
UNKNOWN = "--no-such-option"
_STARTS = re.compile(r'^if __name__ == "__main__":', re.MULTILINE)

# Each command in a fork of one process that has loaded what many of them load.
RUN = """
import json, os, runpy, signal, sys, tempfile, traceback, warnings
import torch, transformers, triton

def ran(name, option):
    sys.argv = [name, option]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code)
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
        return 99

def told(name, option, said):
    said.seek(0)
    said.truncate()
    code = ran(name, option)
    sys.stdout.flush()
    sys.stderr.flush()
    said.seek(0)
    return code, said.read().decode()

def forked(name, options):
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(60)
        with tempfile.TemporaryFile() as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            os.write(theirs, json.dumps([told(name, option, said) for option in options]).encode())
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as answer:
        answered = answer.read()
    os.waitpid(child, 0)
    return json.loads(answered or "null")

warnings.simplefilter("ignore")
names, options = json.loads(sys.argv[1])
print(json.dumps({name: forked(name, options) for name in names}))
"""


def commands() -> list[str]:
    """Modules that do something when they are run."""
    files = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    runs = (path for path in files if path.stem == "__main__" or _STARTS.search(path.read_text(encoding="utf-8")))
    names = (path.relative_to(ROOT) for path in runs)
    return [".".join(name.with_suffix("").parts).removesuffix(".__main__") for name in names]


@cache
def answers() -> dict[str, list[tuple[int, str]]]:
    """Of every command its exit code and what it says: asked for help, and given an option that there is not."""
    # No color and no frames: what is said is looked for as text.
    plain = {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, json.dumps([commands(), ["--help", UNKNOWN]])],
        cwd=ROOT,
        env={**os.environ, **plain, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[tuple[int, str]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_commands_are_found_where_they_are() -> None:
    found = commands()
    assert {"bench.draft", "cli", "kernels.available", "services.decode", "models.nano.tokenizer"} <= set(found)


@pytest.mark.parametrize("name", commands())
def test_a_command_says_what_it_does(name: str) -> None:
    code, said = answers()[name][0]
    assert code == 0 and "usage" in said.lower() and len(said.splitlines()) >= 4, said


@pytest.mark.parametrize("name", commands())
def test_a_command_refuses_an_option_that_it_does_not_know(name: str) -> None:
    code, said = answers()[name][1]
    assert code == 2 and (UNKNOWN in said or "required" in said) and "Traceback" not in said, said
