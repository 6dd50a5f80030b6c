"""A decode step on one GPU by backend, and what batch invariance costs: `python -m bench.engine_backends`.

Some layers of the random model of `bench.engine_gpu`, with the same weights for every backend, through `Engine.step`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch

from bench.arguments import Parser, new_file, positive
from bench.engine_gpu import BLOCK_TOKENS, begin, opened, step_times
from bench.engine_gpu_model import random_model
from bench.table import Row, report
from engine.families.mla.model import Mla
from engine.families.mla.options import Options
from kernels import choose
from kernels.choose import missing_for

BACKENDS = ("triton", "cuda")


def main(argv: list[str] | None = None) -> int:
    """Parse, measure, report."""
    parser = Parser(description=__doc__)
    parser.add_argument("--json", type=new_file, help="also write the table here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=positive, default=6)
    parser.add_argument("--context", type=positive, default=4096, help="tokens before the first that is decoded")
    parser.add_argument("--steps", type=positive, default=24, help="timed steps")
    parser.add_argument("--batch", type=positive, action="append", help="default: 32 and 128")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    rows = list(measured(options))
    return report(f"{options.layers} layers on {torch.cuda.get_device_name()}", rows, options.json)


def measured(options: argparse.Namespace) -> Iterator[Row]:
    """One row for each batch, backend and mode; the modes of one backend follow one another."""
    model = random_model(choose("triton", "cuda"), options.seed, options.layers, BLOCK_TOKENS)
    for batch in options.batch or (32, 128):
        for backend in BACKENDS:
            if missing_for(backend, "cuda"):
                continue
            times = {invariant: step_ms(model, backend, invariant, batch, options) for invariant in (False, True)}
            yield Row(f"batch {batch}, {backend}: step", times[False], "ms")
            yield Row(f"batch {batch}, {backend}: step, batch-invariant", times[True], "ms")
            yield Row(f"batch {batch}, {backend}: cost of invariance", 100 * (times[True] / times[False] - 1), "%")


def step_ms(model: Mla, backend: str, invariant: bool, batch: int, options: argparse.Namespace) -> float:
    """Median milliseconds of a step of the same weights by other operators."""
    ops = choose(backend, "cuda", batch_invariant=invariant)
    made = Mla(model.config, Options(), model.weights, torch.bfloat16, ops, BLOCK_TOKENS, expandable=True)
    engine = opened(made, batch, options.context + options.steps + 32)
    begin(engine, batch, options)
    try:
        return step_times(engine, options.steps)
    finally:
        del engine
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
