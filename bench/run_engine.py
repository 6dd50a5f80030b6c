"""This project's engine as a contender (see bench/job.py): bf16, prompts kept out of the prefix cache."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.generation import generate
from bench.job import Generate, Job, Prompts, run
from engine.config import EngineConfig
from engine.engine import Engine

_BLOCK_TOKENS = 16  # at least: room for every sequence's blocks, whatever their size


def open_generate(job: Job) -> Generate:
    """An engine with room for the largest batch."""
    blocks = max(job.batches) * (-(-(job.prompt + job.new) // _BLOCK_TOKENS) + 1)
    engine = Engine.open(EngineConfig(Path(job.model), dtype="bfloat16", num_blocks=blocks, threads=job.threads))

    def made(given: Prompts, new: int) -> Prompts:
        return generate(engine, given, new)

    return made


if __name__ == "__main__":
    sys.exit(run(open_generate))
