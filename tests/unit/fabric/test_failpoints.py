"""Failpoints: inert by default, exact when armed, refused when unknown; and every one is documented."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fabric import failpoints
from fabric.errors import DataLoss, StartError, Unavailable

ROOT = Path(__file__).parents[3]
POINT = failpoints.declare("test.point")


async def test_a_point_does_nothing_unless_armed() -> None:
    before = POINT.hits
    await POINT.reached()
    with failpoints.armed(""):
        await POINT.reached()
    assert POINT.hits == before


async def test_an_error_is_raised_every_time_or_the_nth_time_alone() -> None:
    with failpoints.armed("test.point=error"):
        for _ in range(2):
            with pytest.raises(Unavailable, match=r"test\.point"):
                await POINT.reached()
    with failpoints.armed("test.point=error:data_loss@2"):
        await POINT.reached()
        with pytest.raises(DataLoss):
            await POINT.reached()
        await POINT.reached()
    await POINT.reached()


async def test_a_delay_passes_that_time() -> None:
    with failpoints.armed("test.point=delay:0.05"):
        started = time.monotonic()
        await POINT.reached()
    assert time.monotonic() - started >= 0.05


@pytest.mark.parametrize(
    "spec",
    [
        "test.point", "test.point=explode", "test.other=exit", "test.point=delay", "test.point=delay:soon",
        "test.point=error:nonsense", "test.point=exit:3", "test.point=exit@0",
    ],
)  # fmt: skip
def test_what_cannot_be_armed_is_refused_with_its_fix(spec: str) -> None:
    with pytest.raises(StartError) as raised, failpoints.armed(spec):
        pass
    assert raised.value.field == "failpoints" and raised.value.fix
    assert POINT.action is None


def test_a_name_has_one_line() -> None:
    with pytest.raises(ValueError, match="twice"):
        failpoints.declare("test.point")


def test_exit_ends_the_process_at_once() -> None:
    code = (
        "import asyncio; from fabric import failpoints as f; p = f.declare('a.b'); f.arm('a.b=exit@2');"
        "asyncio.run(p.reached()); print('once', flush=True); asyncio.run(p.reached()); print('never')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == failpoints.EXIT_CODE
    assert ended.stdout.endswith("once\n") and "armed" in ended.stdout


def test_every_point_of_the_services_is_documented() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "services").rglob("*.py"))
    names = set(re.findall(r'failpoints\.declare\("([^"]+)"\)', sources))
    documented = set(re.findall(r"^\| `([a-z_.]+)` \|", (ROOT / "docs" / "faults.md").read_text(), re.MULTILINE))
    assert names and names == documented
