"""The table of promises tells what was measured, what failed, what was skipped and what nobody measured."""

from __future__ import annotations

import gc
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import promises
from tests.support.procs import ROOT
from tests.support.promises import Figure

pytest_plugins = "pytester"

TESTS = """
import pytest

@pytest.mark.promise(16, 10)
def test_both(promise):
    promise(16, "no work after", 1.25, at_most=2.0, unit="s")
    promise(10, "streams whole", 200, exactly=200)

@pytest.mark.promise(2)
def test_missed(promise):
    promise(2, "flips found", 999, at_least=1000)

@pytest.mark.promise(3)
def test_skipped(promise):
    pytest.skip("no wire here")

@pytest.mark.promise(22)
def test_known(promise):
    promise(22, "new epochs", 0, exactly=1, reason="memory outlives a partition")

@pytest.mark.promise(4)
def test_without_a_figure():
    pass

@pytest.mark.promise(5)
def test_undeclared(promise):
    promise(6, "of another", 1, exactly=1)

def test_that_measures_nothing():
    pass
"""


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    """A run that settings of no folder above reach."""
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\nmarkers = chaos\n")
    return pytester.runpytest("-p", "tests.support.promises", *options)


@pytest.fixture
def rows(pytester: pytest.Pytester) -> dict[str, list[tuple[str, ...]]]:
    """Cells of the written file by promise, after a run of TESTS."""
    pytester.makepyfile(TESTS)
    result = run(pytester, "-p", "no:randomly", "--promises", "out.md")
    result.assert_outcomes(passed=4, failed=2, skipped=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    found: dict[str, list[tuple[str, ...]]] = {}
    written = (pytester.path / "out.md").read_text()
    for line in written.splitlines():
        if line.startswith("| ") and not line.startswith("| #"):
            number, *cells = (cell.strip() for cell in line.strip("| ").split(" | "))
            found.setdefault(number, []).append(tuple(cells))
    assert all(line in result.outlines for line in written.splitlines() if line.startswith("|"))
    return found


def test_figures_failures_skips_and_gaps_are_all_shown(rows: dict[str, list[tuple[str, ...]]]) -> None:
    assert list(rows) == [str(number) for number in promises.PROMISES]
    cells = {number: found[0][1:5] for number, found in rows.items()}
    assert cells["16"] == ("no work after", "1.25 s", "<= 2 s", "kept")
    assert cells["10"] == ("streams whole", "200", "= 200", "kept")
    assert cells["2"] == ("flips found", "999", ">= 1,000", "missed")
    assert rows["2"][1][4] == "test failed"
    assert cells["3"][3] == "skipped: no wire here"
    assert cells["22"][3] == "missed: memory outlives a partition"
    assert cells["4"][3] == "no figure"
    assert cells["5"][3] == "test failed"
    assert cells["11"][3].startswith("not measured")


def test_a_promise_that_does_not_exist_is_a_usage_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.promise(999)\ndef test_it():\n    pass\n")
    result = run(pytester)
    assert result.ret not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    result.stderr.fnmatch_lines(["*there are no promises*999*"])


def test_without_the_option_nothing_is_printed_or_written(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import pytest\n@pytest.mark.promise(2)\ndef test_it(promise):\n    promise(2, 'x', 1, exactly=1)\n"
    )
    result = run(pytester)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*promises*kept*")
    assert [path.suffix for path in Path(pytester.path).glob("*.md")] == []


@pytest.mark.parametrize(("option", "passed"), [((), 1), (("--promises", "out.md"), 0)])
def test_a_busy_machine_may_be_late_where_nobody_reads_the_figures(
    pytester: pytest.Pytester, option: tuple[str, ...], passed: int
) -> None:
    pytester.makepyfile(
        "import pytest\n"
        "@pytest.mark.promise(13)\n"
        "@pytest.mark.parametrize('took_s', [4.9, 6.1])\n"
        "def test_it(promise, took_s):\n"
        "    promise(13, 'idle after', took_s, at_most=1.0, unit='s')\n"
        "@pytest.mark.promise(13)\n"
        "def test_count(promise):\n"
        "    promise(13, 'steps', 2, at_most=1)\n"
    )
    result = run(pytester, *option)
    result.assert_outcomes(passed=passed, failed=3 - passed)


def test_promise_implies_chaos(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import pytest\n@pytest.mark.promise(2)\ndef test_it():\n    pass\ndef test_other():\n    pass\n"
    )
    result = run(pytester, "-m", "chaos")
    result.assert_outcomes(passed=1, deselected=1)


@pytest.mark.parametrize(
    ("relation", "value", "kept"), [("<=", 2.0, True), ("<=", 2.1, False), (">=", 1.9, False), ("=", 2.0, True)]
)
def test_a_bar_is_kept_or_missed(relation: str, value: float, kept: bool) -> None:
    figure = Figure(2, "x", value, relation, 2.0)
    assert figure.kept is kept
    assert figure.verdict == ("kept" if kept else "missed")
    assert replace(figure, reason="known").verdict == ("kept" if kept else "missed: known")


def test_verdicts_count_promises_not_figures() -> None:
    rows = [("1", "", "", "", "", "kept", ""), ("1", "", "", "", "", "kept", ""), ("2", "", "", "", "", "missed", "")]
    assert promises.verdicts([*rows, ("3", "", "", "", "", "not measured", "")]) == (
        "1 promises kept; not in every figure: 2; not measured: 3"
    )


def test_the_verb_of_the_makefile_is_a_command_that_pytest_takes() -> None:
    """An option and its value in two words would name a folder without conftest.py to a pytest that has no other."""
    lines = subprocess.run(["make", "-n", "test-chaos"], cwd=ROOT, text=True, capture_output=True, check=True)
    command = next(line for line in lines.stdout.splitlines() if "pytest" in line)
    options = shlex.split(command.split("pytest", 1)[1])
    taken = [sys.executable, "-m", "pytest", *options, "--markers"]
    subprocess.run(taken, cwd=ROOT, check=True, capture_output=True, timeout=60)


LEFT = """
import gc

import pytest

@pytest.mark.promise(16)
def test_measures(promise):
    assert bool(gc.get_freeze_count()) == {frozen}

def test_measures_nothing():
    assert not gc.get_freeze_count()
"""


@pytest.mark.parametrize("options", [(), ("--promises", "out.md")])
def test_what_others_left_is_kept_out_of_collections_where_figures_are_read(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    gc.unfreeze()  # what another test of a server froze
    pytester.makepyfile(LEFT.format(frozen=bool(options)))
    run(pytester, "-p", "no:randomly", *options).assert_outcomes(passed=2)
