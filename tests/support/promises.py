"""Promises about failures: a pytest plugin that gathers the figures that tests measure, and shows them as one table.

A test says `@pytest.mark.promise(16)` and calls its fixture: `promise(16, "frozen: no work after", 1.4, at_most=2)`.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import platform
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

PROMISES: Mapping[int, str] = {
    1: "prefill and decode answer together what one process answers, token for token",
    2: "a damaged byte of KV never becomes a token",
    3: "a cut, damaged, repeated or foreign message is refused",
    4: "memory of an unfinished transfer waits for its writer's end before it is used again",
    5: "an earlier incarnation changes nothing",
    6: "KV whose lease is over is never decoded from",
    7: "a prefix hit comes from equal tokens, history, tenant and weights alone",
    8: "stored records come back whole or not at all",
    10: "an answer that moves loses no token and repeats none",
    11: "every request ends by its deadline, whatever the network does",
    12: "a call without a deadline gets one, an absurd one is capped",
    13: "a client that leaves stops all work for it",
    14: "after a storm nothing is held",
    15: "a dead decode worker is noticed",
    16: "a frozen service is noticed, a busy one keeps its place",
    17: "one of two decode workers dies under load",
    18: "one of two prefill workers dies under load",
    19: "a dead gateway strands nothing",
    20: "without kvstore or recipe the damage is what it must be, no more",
    21: "serving goes on while etcd is away",
    22: "a worker cut off from etcd leaves the pool and comes back",
    23: "SIGTERM drains; a rolling restart loses nothing",
    24: "services start in any order",
    25: "a start that fails leaves nothing behind",
    37: "tenants share nothing by default",
    40: "hostile bytes never crash a process",
}
_BOUNDS = {"at_most": "<=", "at_least": ">=", "exactly": "="}
_HEADER = ("#", "promise", "figure", "measured", "bar", "verdict", "test")
BUSY_S = 5.0  # what a busy machine may add to seconds that nobody asked to see
_PROPERTY, _MEASURES = "promise figure", "promises"
_INTRODUCTION = """# Promises

What the stack promises for the case that parts of it fail, and what was measured of it. `make test-chaos` writes this
file. The numbers are those of the project's list of promises; those that are not here have nothing to do with failures.
"""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure. `reason`: why a bar that is missed is known to be; empty where it must hold."""

    promise: int
    what: str
    value: float
    relation: str
    bar: float
    unit: str = ""
    reason: str = ""

    @property
    def kept(self) -> bool:
        match self.relation:
            case "<=":
                return self.value <= self.bar
            case ">=":
                return self.value >= self.bar
        return self.value == self.bar

    @property
    def verdict(self) -> str:
        if self.kept:
            return "kept"
        return f"missed: {self.reason}" if self.reason else "missed"

    def cells(self) -> tuple[str, str, str, str]:
        """What, measured, bar, verdict."""
        measured = f"{_number(self.value)} {self.unit}".rstrip()
        return self.what, measured, f"{self.relation} {_number(self.bar)} {self.unit}".rstrip(), self.verdict


@dataclass(slots=True)
class _Test:
    """What became of one test that measures promises."""

    promises: Sequence[int]
    figures: list[Figure] = field(default_factory=list)
    trouble: str = ""


class Ledger:
    """Hears of every test's end; knows what was measured, what failed and what nobody measured."""

    def __init__(self) -> None:
        self._tests: dict[str, _Test] = {}

    def heard(self, report: pytest.TestReport) -> None:
        """Takes the end of one phase of a test."""
        properties = dict(report.user_properties)
        if _MEASURES not in properties:
            return
        test = self._tests.setdefault(report.nodeid, _Test(properties[_MEASURES]))
        test.figures = [Figure(**json.loads(str(v))) for name, v in report.user_properties if name == _PROPERTY]
        if report.skipped:
            test.trouble = f"skipped: {_skip_reason(report)}"
        elif report.failed:
            test.trouble = "test failed"

    def rows(self) -> list[tuple[str, ...]]:
        """One row for each figure and for each test without one, by promise, then by test."""
        rows: list[tuple[str, ...]] = []
        for number, words in PROMISES.items():
            of_promise = list(self._rows_of(number)) or [("", "", "", "not measured", "")]
            for index, row in enumerate(of_promise):
                rows.append((str(number), "" if index else words, *row))
        return rows

    def _rows_of(self, number: int) -> Iterator[tuple[str, ...]]:
        for nodeid in sorted(self._tests):
            test, name = self._tests[nodeid], f"`{nodeid.removeprefix('tests/')}`"
            figures = [figure for figure in test.figures if figure.promise == number]
            for figure in figures:
                yield *figure.cells(), name
            if number in test.promises and (test.trouble or not test.figures):
                yield "", "", "", test.trouble or "no figure", name


class Recorder:
    """The fixture `promise` of one test."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._declared = _numbers(item)
        self._slack_s = 0.0 if item.config.getoption("promises") else BUSY_S

    def __call__(
        self, number: int, what: str, value: float, *, unit: str = "", reason: str = "", **bound: float
    ) -> None:
        """Records a figure; a bar that is missed fails the test unless `reason` says why it is known to be.

        Without --promises nobody reads the figures, and the machine may do anything else beside the test: then a bar
        of seconds is missed by more than BUSY_S, or not at all.

        Args:
            number: the promise; one that the test's marker names.
            what: a few words on what was measured.
            value, unit: the figure.
            bound: one of `at_most`, `at_least` and `exactly`.
        """
        if number not in self._declared:
            raise pytest.UsageError(f"{self._item.nodeid} measures promise {number}: say so in its marker")
        [(kind, bar)] = bound.items()
        figure = Figure(number, what, round(value, 6), _BOUNDS[kind], bar, unit, reason)
        self._item.user_properties.append((_PROPERTY, json.dumps(asdict(figure))))
        assert figure.kept or reason or self._is_near(figure), f"promise {number}: {', '.join(figure.cells())}"

    def _is_near(self, figure: Figure) -> bool:
        return figure.unit == "s" and figure.relation == "<=" and figure.value <= figure.bar + self._slack_s


class PromisePlugin:
    """Prints the table at the end of a run and writes it to a file."""

    def __init__(self, path: Path, command: str) -> None:
        self.ledger = Ledger()
        self._path, self._command, self._began = path, command, time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ledger.heard(report)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        rows = self.ledger.rows()
        terminalreporter.section("promises")
        for line in table(rows):
            terminalreporter.write_line(line)
        minutes = (time.monotonic() - self._began) / 60
        self._path.write_text(document(rows, machine(), self._command, minutes))
        terminalreporter.write_line(f"{verdicts(rows)}; written to {self._path}")


def document(rows: Sequence[Sequence[str]], where: str, command: str, minutes: float) -> str:
    """The Markdown file."""
    run = f"{where}, {minutes:.0f} min: `{command}`. {verdicts(rows)}."
    return "\n".join([_INTRODUCTION, run, "", *table(rows), ""])


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Markdown lines whose columns are aligned."""
    cells = [_HEADER, *([text.replace("|", "\\|") for text in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADER))]
    head, *lines = [" | ".join(map(str.ljust, row, widths)) for row in cells]
    return [f"| {head} |", f"|{'|'.join('-' * (width + 2) for width in widths)}|", *(f"| {line} |" for line in lines)]


def verdicts(rows: Iterable[Sequence[str]]) -> str:
    """How many promises are kept in all figures, and the numbers of the others."""
    by_promise: dict[str, list[str]] = {}
    for row in rows:
        by_promise.setdefault(row[0], []).append(row[5])
    kept = [number for number, found in by_promise.items() if set(found) == {"kept"}]
    unmeasured = [number for number, found in by_promise.items() if found == ["not measured"]]
    others = [number for number in by_promise if number not in {*kept, *unmeasured}]
    parts = [f"{len(kept)} promises kept"]
    parts += [f"not in every figure: {', '.join(others)}"] if others else []
    parts += [f"not measured: {', '.join(unmeasured)}"] if unmeasured else []
    return "; ".join(parts)


def machine() -> str:
    """Date, cores and versions: what a figure depends on beside the code."""
    today = datetime.datetime.now(tz=datetime.UTC).date()
    cores = len(os.sched_getaffinity(0))
    return f"{today}, {cores} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}"


@pytest.fixture
def promise(request: pytest.FixtureRequest) -> Iterator[Recorder]:
    """Records a measured figure of a promise; see `Recorder.__call__`.

    Where figures are read, what earlier tests left is kept out of this one's collections of garbage: a full one stops
    a process of two hundred tests for 0.2 to 1.4 s, and a service, which freezes what it loaded, for no such time.
    """
    is_measured = bool(request.config.getoption("promises"))
    if is_measured:
        gc.collect()
        gc.freeze()
    yield Recorder(request.node)
    if is_measured:
        gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--promises", metavar="FILE", help="print the table of promises and write it to FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "promise(number, ...): promises that the test measures; implies chaos")
    path = config.getoption("promises")
    if path:
        command = shlex.join(["pytest", *map(str, config.invocation_params.args)])
        config.pluginmanager.register(PromisePlugin(Path(path), command), "promise table")


def pytest_itemcollected(item: pytest.Item) -> None:
    numbers = _numbers(item)
    if numbers:
        item.user_properties.append((_MEASURES, numbers))
        item.add_marker(pytest.mark.chaos)


def _numbers(item: pytest.Item) -> list[int]:
    numbers = sorted({number for mark in item.iter_markers("promise") for number in mark.args})
    if unknown := set(numbers) - PROMISES.keys():
        raise pytest.UsageError(f"{item.nodeid}: there are no promises {sorted(unknown)}")
    return numbers


def _number(value: float) -> str:
    """Large and whole numbers without a fraction, others with three digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.3g}"


def _skip_reason(report: pytest.TestReport) -> str:
    return (
        str(report.longrepr[2]).removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else "no reason given"
    )
