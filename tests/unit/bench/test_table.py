"""Bench tables: a missed bar, a NaN and an empty table all end in exit code 1."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from bench.table import Row, report


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


@pytest.mark.parametrize(
    ("row", "holds"),
    [
        (Row("a", 1.0, "ms", 1.0), True),
        (Row("a", 1.1, "ms", 1.0), False),
        (Row("a", 2.0, "x", 2.0, ">="), True),
        (Row("a", 1.9, "x", 2.0, ">="), False),
        (Row("a", math.nan, "x", 2.0, ">="), False),
        (Row("a", math.nan, "x", 2.0), False),
        (Row("a", 123.0), True),
    ],
)
def test_one_figure_decides_the_exit_code(row: Row, holds: bool) -> None:
    assert row.holds is holds
    assert report("title", [row], console=quiet()) == (0 if holds else 1)


def test_one_miss_among_many_fails_and_is_printed() -> None:
    console = quiet()
    assert report("title", [Row("good", 1, "", 2), Row("bad", 3, "", 2)], console=console) == 1
    assert console.file.getvalue().count("MISS") == 1  # type: ignore[attr-defined]


def test_no_figures_is_no_success() -> None:
    assert report("title", [], console=quiet()) == 1


def test_json_is_valid_even_with_nan(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    report("title", [Row("a", math.nan, "x", 1.0), Row("b", 0.5, "ms", 1.0)], path, quiet())
    content = json.loads(path.read_text())
    assert content["passed"] is False
    assert [row["holds"] for row in content["rows"]] == [False, True]
    assert content["rows"][0]["value"] == "nan"
