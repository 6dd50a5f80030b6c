"""Weights kept quantized on the CPU against weights dequantized once: the products of one decode step, and memory.

`python -m bench.quantized [--json PATH]`. Every matrix that a token multiplies with is multiplied once per step (of
experts as many as a token chooses, of several rows as many different ones as there are), so that tokens per CPU second
are those of a model that did nothing else, on one thread. That the quantized products equal the dequantized ones bit
for bit is checked first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numba import set_num_threads

from bench.arguments import Parser, new_file
from bench.quantized_tile import FP8_BLOCK, pack, product
from bench.table import Row, report
from engine.checkpoint.formats import fp4_packed, fp8_blocks
from engine.checkpoint.quantize import fp4_quantize, fp8_quantize
from kernels import Ops, choose

THREADS = 1  # CPU time of one thread is what a busy machine distorts least
ROUNDS = 5
Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of matrix: outputs, inputs, and how many of them a step multiplies with, `distinct` held in memory."""

    out: int
    inner: int
    used: dict[int, int]  # by batch size
    distinct: int


@dataclass(frozen=True, slots=True)
class Model:
    """Matrices of a model, experts apart. `rows`: of a batch that one expert gets."""

    name: str
    shared: tuple[Shape, ...]
    experts: tuple[Shape, ...]


def _every(count: int) -> dict[int, int]:
    return {1: count, 8: count}


# nano: 8 layers, hidden 256, 8 experts of which 2 are chosen and one shared. Eight rows choose all of them.
NANO = Model(
    "nano (V4)",
    (
        Shape(1024, 128, _every(8), 8), Shape(256, 256, _every(8), 8), Shape(256, 256, _every(8), 8),
        Shape(3840, 256, _every(1), 1),
    ),
    (Shape(256, 256, {1: 9 * 8, 8: 27 * 8}, 27 * 8),),
)  # fmt: skip
# A V3-like model that no cache holds: 2 layers, hidden 2048, 16 experts of 1024, 4 chosen and one shared. Eight rows
# choose 14 of them.
WIDE = Model(
    "V3-like, 2 layers",
    (
        Shape(2048, 2048, _every(2), 2), Shape(3072, 512, _every(2), 2), Shape(2048, 2048, _every(2), 2),
        Shape(8192, 2048, _every(1), 1),
    ),
    (Shape(1024, 2048, {1: 10 * 2, 8: 30 * 2}, 34 * 2), Shape(2048, 1024, {1: 5 * 2, 8: 15 * 2}, 17 * 2)),
)  # fmt: skip


def _random(shape: Shape, fp8: bool, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as bytes and E8M0 scales of normally distributed weights."""
    weight = torch.randn(shape.out, shape.inner, generator=generator)
    codes, scale = fp8_quantize(weight, (FP8_BLOCK, FP8_BLOCK)) if fp8 else fp4_quantize(weight)
    return codes.view(torch.uint8), scale


def _dequantized(codes: torch.Tensor, scale: torch.Tensor, fp8: bool) -> torch.Tensor:
    if fp8:
        return fp8_blocks(codes.view(torch.float8_e4m3fn), scale, (FP8_BLOCK, FP8_BLOCK))
    return fp4_packed(codes, scale)


def _products(ops: Ops, shape: Shape, kind: str, fp8: bool, rows: int, step: int) -> tuple[Step, int]:
    """What one step multiplies with matrices of this shape, and the bytes of all of them."""
    generator = torch.Generator().manual_seed(0)
    codes, scale = _random(shape, fp8, generator)
    x = torch.randn(rows, shape.inner, generator=generator)
    if kind == "quantized":
        panels, factors = pack(codes.numpy(), 2.0 ** (scale.numpy().astype(np.float32) - 127), fp8)
        held = [(panels.copy(), factors.copy()) for _ in range(shape.distinct)]
        out = np.empty((rows, shape.out), np.float32)

        def run() -> None:
            for one, factor in held[: shape.used[step]]:
                product(x.numpy(), one, factor, fp8, out)

        return run, sum(one.nbytes + factor.nbytes // (4 if not fp8 else 1) for one, factor in held)
    weight = _dequantized(codes, scale, fp8)[None]
    first = ops.pack(weight, False)
    array = _widened(first.array) if kind == "fp32" else first.array
    dense = [replace(first, array=array.copy()) for _ in range(shape.distinct)]

    def run_dense() -> None:
        for one in dense[: shape.used[step]]:
            ops.linear(x, one)

    return run_dense, sum(one.array.nbytes for one in dense)


def _widened(array: np.ndarray) -> np.ndarray:
    return (array.astype(np.uint32) << 16).view(np.float32)


def check(ops: Ops) -> None:
    """Raises AssertionError unless the prototype's products are the engine's, bit for bit."""
    shape = Shape(256, 256, {1: 1}, 1)
    for fp8 in (True, False):
        codes, scale = _random(shape, fp8, torch.Generator().manual_seed(1))
        panels, factors = pack(codes.numpy(), 2.0 ** (scale.numpy().astype(np.float32) - 127), fp8)
        for rows in (1, 8):
            x = torch.randn(rows, shape.inner, generator=torch.Generator().manual_seed(2))
            out = np.empty((rows, shape.out), np.float32)
            product(x.numpy(), panels, factors, fp8, out)
            wanted = ops.linear(x, ops.pack(_dequantized(codes, scale, fp8)[None], False))
            if not np.array_equal(out, wanted.numpy()):
                raise AssertionError(f"{'FP8' if fp8 else 'FP4'} products of {rows} rows differ")


def measure(ops: Ops, model: Model, kind: str, fp4_experts: bool, batch: int) -> tuple[float, float]:
    """Tokens per CPU second in the best of some rounds, and megabytes."""
    rows = 1 if batch == 1 else 4  # of an expert: a batch of eight spreads over many
    steps = [_products(ops, shape, kind, True, batch, batch) for shape in model.shared]
    steps += [_products(ops, shape, kind, not fp4_experts, min(rows, batch), batch) for shape in model.experts]
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for run, _ in steps:
            run()
        times.append(time.process_time() - began)
    return batch / min(times), sum(size for _, size in steps) / 1e6


def main(arguments: list[str]) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--json", type=new_file, help="write the table as JSON, too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    set_num_threads(THREADS)
    ops, rows = choose("cpu"), []
    check(ops)
    for model in (NANO, WIDE):
        for experts, fp4 in (("FP8", False), ("FP4", True)):
            for kind in ("fp32", "bf16", "quantized"):
                title = f"{model.name}, {experts} experts, {'kept ' if kind == 'quantized' else 'as '}{kind}"
                for batch in (1, 8):
                    speed, size = measure(ops, model, kind, fp4, batch)
                    rows.append(Row(f"{title}, batch {batch}", speed, "tokens/CPU s"))
                rows.append(Row("  memory", size, "MB"))
    return report("Products of a decode step", rows, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
