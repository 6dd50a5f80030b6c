"""Every family from an empty folder to an answer: `deepinfer make-tiny`, then `deepinfer up --smoke`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# A stack of processes starts for each; one family that is not nano's runs with every change.
FAMILIES = ["v3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v2", "v32", "v4", "v41"))]

# Where nothing is compiled yet, the first family waits for every kernel; on a busy machine that takes minutes.
_LONGEST_S = 550
pytestmark = pytest.mark.timeout(600)


def deepinfer(folder: Path, *arguments: str) -> str:
    """Output of the command; fails with its errors when it does."""
    done = subprocess.run(
        [sys.executable, "-m", "cli", *arguments],
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder / "runtime")},
        capture_output=True,
        text=True,
        timeout=_LONGEST_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_checkpoint_of_the_family_answers(family: str, tmp_path: Path) -> None:
    model = tmp_path / f"tiny-{family}"
    deepinfer(tmp_path, "make-tiny", family, str(model))
    told = deepinfer(tmp_path, "up", "--model", str(model), "--smoke", "--http-port", "0")
    assert f"ready: tiny-{family}" in told
    answered = re.search(r"^timings .* (\d+) tokens from \d+", told, flags=re.MULTILINE)
    assert answered and int(answered[1]) > 0, told
