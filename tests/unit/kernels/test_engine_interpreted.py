"""The engine's Triton operators against the reference in Triton's interpreter, fp32."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "checks", ["engine_interpreted", "engine_hopper", "engine_records", "window_records", "chain_records"]
)
def test_operators_equal_the_reference_in_tritons_interpreter(checks: str) -> None:
    pytest.importorskip("triton", reason="triton comes with the extras 'dev' and 'gpu'")
    # In a process of its own: triton decides when it is imported whether it interprets.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", f"kernels.testing.{checks}"]
    made = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, env=environment)
    assert made.returncode == 0, made.stdout + made.stderr
