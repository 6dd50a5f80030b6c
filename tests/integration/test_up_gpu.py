"""`deepinfer up --device cuda` as a user runs it: etcd, Redis and every service, and a question answered on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
UP = [sys.executable, "-m", "cli", "up", "--http-port", "0", "--device", "cuda", "--smoke"]


def test_a_stack_on_a_gpu_answers_and_ends_well(tmp_path: Path) -> None:
    made = subprocess.run(
        [*UP, "--log-dir", str(tmp_path / "logs")], env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "runtime")},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout
    assert "42" in made.stdout.partition("answer")[2], made.stdout
    for worker in ("prefill-0", "decode-0"):
        assert "cuda" in (tmp_path / "logs" / f"{worker}.log").read_text(), "the worker says where it computes"
