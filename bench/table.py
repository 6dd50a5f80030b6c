"""Tables of measured figures beside their bars, printed and as JSON. Knows verdicts; measures nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. Without a bar it is shown and judged by nobody; NaN never holds."""

    name: str
    value: float
    unit: str = ""
    bar: float | None = None
    better: Literal["<=", ">="] = "<="

    @property
    def holds(self) -> bool:
        """Whether the figure reaches its bar."""
        if self.bar is None:
            return True
        if math.isnan(self.value):
            return False
        return self.value <= self.bar if self.better == "<=" else self.value >= self.bar

    @property
    def verdict(self) -> str:
        """What the table says of it."""
        return "" if self.bar is None else "ok" if self.holds else "MISS"


def report(title: str, rows: Sequence[Row], json_path: Path | None = None, console: Console | None = None) -> int:
    """Print the table and, if asked, write it as JSON. Exit code: 0 if every bar is reached, else 1 (or no rows)."""
    table = Table(title=title, title_justify="left")
    for heading in ("figure", "value", "bar", ""):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for row in rows:
        bar = "" if row.bar is None else f"{row.better} {row.bar:.4g}"
        style = "" if row.holds else "bold red"
        table.add_row(row.name, f"{row.value:.4g} {row.unit}".strip(), bar, row.verdict, style=style)
    (console or Console()).print(table)
    passed = bool(rows) and all(row.holds for row in rows)
    if json_path is not None:
        figures = [{**asdict(row), "value": _plain(row.value), "holds": row.holds} for row in rows]
        content = {"title": title, "passed": passed, "rows": figures}
        json_path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0 if passed else 1


def _plain(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else str(value)
