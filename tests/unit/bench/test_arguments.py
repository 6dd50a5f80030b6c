"""A bench command that is given what is not there says so in one line, exit code 2, before it measures anything."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.arguments import Parser, byte_size, existing_file, existing_folder, model_folder, new_file, positive, program

BENCH = Path(__file__).resolve().parents[3] / "bench"
NANO = BENCH.parent / "models" / "nano"
WITH_JSON = sorted(path.stem for path in BENCH.glob("*.py") if '"--json", type=' in path.read_text(encoding="utf-8"))
NEEDED = {"draft": [str(NANO)], "kvtrace": ["--agent"]}


def refusal(name: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says."""
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"bench.{name}").main(arguments)
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1), said.err
    return said.err


def test_no_command_takes_a_path_unseen() -> None:
    """Every path and size of a command is judged by bench/arguments.py."""
    unseen = re.compile(r'add_argument\(\s*"--?[^)]*?type=(Path|str)\b|-bytes", type=int', re.DOTALL)
    hidden = "argparse.SUPPRESS"  # commands that a benchmark gives itself
    for path in BENCH.glob("*.py"):
        for found in unseen.finditer(path.read_text(encoding="utf-8")):
            line = path.read_text(encoding="utf-8")[found.start() :].split("\n", 1)[0]
            assert hidden in line, f"{path.name}: {line}"


@pytest.mark.parametrize("name", WITH_JSON)
def test_a_table_that_could_not_be_written_is_told_before_it_is_measured(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(name, [*NEEDED.get(name, []), "--json", "/nope/table.json"], capsys)
    assert "--json" in said and "/nope/table.json" in said


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("draft", ["/nope"], "/nope is not a folder"),
        ("draft", [str(NANO), "--text", "/nope"], "/nope is not a file"),
        ("draft", [str(BENCH)], "config.json"),
        ("engine", ["--model", "/nope"], "/nope is not a folder"),
        ("stack", ["--model", "/nope"], "/nope is not a folder"),
        ("stack", ["--rounds", "0"], "--rounds"),
        ("kvstore", ["--fio", "/nope"], "no program /nope"),
        ("kvstore", ["--dir", "/nope"], "/nope is not a folder"),
        ("kvtrace", ["--trace", "/nope"], "/nope is not a file"),
        ("parity", ["--fixtures", "/nope"], "/nope is not a folder"),
        ("parity", ["--v41-config", "/nope"], "/nope is not a file"),
        ("push", ["--bytes", "many"], "is not a size"),
        ("handoff", ["--window-bytes", "-1"], "--window-bytes"),
        ("load", ["--jason", "x"], "--jason"),
    ],
)
def test_what_is_not_there_is_told_in_one_line(
    name: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refusal(name, arguments, capsys)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (existing_folder, str(BENCH), BENCH),
        (existing_file, __file__, Path(__file__)),
        (model_folder, str(NANO), NANO),
        (new_file, "table.json", Path("table.json")),
        (positive, "3", 3),
        (byte_size, "4MiB", 4 << 20),
        (byte_size, "4194304", 4 << 20),
    ],
)
def test_what_is_there_passes(kind: Callable[[str], Any], text: str, value: Any) -> None:
    assert kind(text) == value


def test_a_program_is_found_by_its_name() -> None:
    assert Path(program("sh")).is_file()


def test_no_option_goes_by_its_first_letters() -> None:
    parser = Parser(description="x")
    parser.add_argument("--rounds")
    with pytest.raises(SystemExit):
        parser.parse_args(["--round", "3"])
