"""Every launch of the engine's Triton kernels compiles for GPUs that are not here, and spills no more than declared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton comes with the extras 'dev' and 'gpu'")


@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_compile_ahead_and_spill_no_more_than_declared(capability: int, tmp_path: Path) -> None:
    # In a process of its own: triton is told of a device that is not there.
    command = [sys.executable, "-m", "kernels.report", "--capability", str(capability), "--dtype", "bfloat16"]
    made = subprocess.run(
        [*command, "--json", str(tmp_path / "report.json")], check=False, capture_output=True, text=True, timeout=300
    )
    assert made.returncode == 0, made.stdout + made.stderr
    figures = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    names = {figure["name"] for figure in figures}
    assert names >= {"_few_rows", "_absorb", "_attend", "_leave", "_entering", "_leaving", "_compress", "_site"}
    large = [figure for figure in figures if figure["name"].startswith("gemm_large")]
    assert bool(large) == (capability == 90)  # a kernel for Hopper
    assert all(figure["stack_bytes"] == 0 for figure in large)
    assert all(0 < figure["registers"] <= 255 for figure in figures)
    assert all(figure["shared_bytes"] <= 227 * 1024 for figure in figures)
