"""A speed contest: contenders generate from the same prompts, each in a process and an environment of its own.

They run one after another, so that nobody takes another's cores. Knows jobs, results and environments; judges nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.job import Job, Timing, read_timings, write_job

_ROOT = Path(__file__).parent.parent
_DEADLINE_S = 1800.0


class MissingPeer(Exception):
    """A contender whose environment does not stand. `fix` says how to build it."""

    def __init__(self, name: str, fix: str) -> None:
        super().__init__(f"the environment of {name} does not stand; build it with: {fix}")
        self.fix = fix


@dataclass(frozen=True, slots=True)
class Contender:
    """A module run as `python -m MODULE JOB RESULTS`, and the interpreter whose packages it needs."""

    name: str
    module: str
    python: Path
    fix: str

    def require(self) -> None:
        """Raises MissingPeer if its interpreter is not there."""
        if not self.python.exists():
            raise MissingPeer(self.name, self.fix)


ENGINE = Contender("engine", "bench.run_engine", Path(sys.executable), "make setup")
PEERS = {
    "transformers": Contender("transformers", "bench.run_transformers", Path(sys.executable), "make setup"),
    "vllm": Contender("vllm", "bench.run_vllm", _ROOT / ".peers" / "vllm" / "bin" / "python", "make peers"),
}


def compete(contender: Contender, job: Job) -> list[Timing]:
    """Its timings, batch by batch. Raises RuntimeError with the end of its output if it fails."""
    contender.require()
    with tempfile.TemporaryDirectory() as folder:
        given, results = Path(folder) / "job.json", Path(folder) / "results.json"
        write_job(job, given)
        command = [str(contender.python), "-m", contender.module, str(given), str(results)]
        done = subprocess.run(
            command, cwd=_ROOT, env=_environment(job.threads), timeout=_DEADLINE_S, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{contender.name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"[-4000:])
        return read_timings(results)


def _environment(threads: int) -> dict[str, str]:
    """This process's environment with `threads` for every library that starts some."""
    counts = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")}
    return {**os.environ, **counts, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
