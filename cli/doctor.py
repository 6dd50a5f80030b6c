"""`deepinfer doctor`: looks at this machine and says what a stack would miss, with the fix. Changes nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from cli.console import out


class Health(StrEnum):
    """How bad a finding is: `fail` keeps a stack from running, `warn` costs speed or comfort."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw, and what to do about it."""

    health: Health
    detail: str
    fix: str = ""


Check = Callable[[], Finding]
LongCheck = Callable[[Callable[[int, int], None]], Finding]
"""A check that tells what it has done, of how much, while it runs."""

_STYLES = {Health.OK: "green", Health.WARN: "yellow", Health.FAIL: "bold red"}


def doctor(checks: dict[str, Check], long: dict[str, LongCheck] | None = None) -> int:
    """Runs every check, the `long` ones last and with a bar, and prints a row for each. Exit code 1 when one fails."""
    findings = _run(checks) | {name: _watched(name, check) for name, check in (long or {}).items()}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("check", "", "found", "fix"):
        table.add_column(heading, overflow="fold")
    for name, finding in findings.items():
        verdict = f"[{_STYLES[finding.health]}]{finding.health}[/]"
        table.add_row(name, verdict, escape(finding.detail), escape(finding.fix))
    out.print(table)
    return 1 if any(finding.health is Health.FAIL for finding in findings.values()) else 0


def _run(checks: dict[str, Check]) -> dict[str, Finding]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=out, transient=True) as progress:
        watching = progress.add_task("", total=len(checks))
        findings = {}
        for name, check in checks.items():
            progress.update(watching, description=f"checking {name}")
            findings[name] = _guarded(check)
            progress.advance(watching)
    return findings


def _watched(name: str, check: LongCheck) -> Finding:
    with Progress(console=out, transient=True) as progress:
        watching = progress.add_task(f"checking {name}", total=None)
        return _guarded(lambda: check(lambda done, total: progress.update(watching, completed=done, total=total)))


def _guarded(check: Check) -> Finding:
    try:
        return check()
    except Exception as error:  # a check that breaks is itself a finding, and the others still run
        return Finding(Health.FAIL, f"the check itself failed: {type(error).__name__}: {error}")
