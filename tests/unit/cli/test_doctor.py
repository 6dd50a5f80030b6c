"""The doctor prints every finding with its fix, and its exit code is the worst of them."""

import io

import pytest
from rich.console import Console

from cli import doctor
from cli.doctor import Finding, Health


def broken() -> Finding:
    raise OSError("no such device")


@pytest.mark.parametrize(("health", "code"), [(Health.OK, 0), (Health.WARN, 0), (Health.FAIL, 1)])
def test_only_a_failure_fails_the_doctor(health, code):
    assert doctor.doctor({"fine": lambda: Finding(Health.OK, ""), "other": lambda: Finding(health, "")}) == code


def test_a_long_check_reports_while_it_runs_and_counts_as_any_other():
    def long(tell):
        tell(1, 2)
        return Finding(Health.FAIL, "half of it is broken")

    assert doctor.doctor({"fine": lambda: Finding(Health.OK, "")}, {"every byte": long}) == 1


def test_a_check_that_breaks_is_a_finding_and_the_others_still_run(monkeypatch):
    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(doctor, "out", console)
    code = doctor.doctor({"first": broken, "second": lambda: Finding(Health.WARN, "8 MB", "ulimit -l unlimited")})
    first, second = console.file.getvalue().splitlines()[-2:]
    assert code == 1
    assert "fail" in first
    assert "no such device" in first
    assert second.split() == ["second", "warn", "8", "MB", "ulimit", "-l", "unlimited"]
