"""GPU kernels beside the bars: `python -m bench.kernels`. Exit code 1 where a bar is missed.

Every figure is a median by the device's clock with the L2 flushed, on random operands; before a kernel is timed its
output is compared with the definition on those operands (float64 where it computes), and its repeats bit for bit. Bars
are times of public kernels, measured on one H200 with the same shapes and the same method, divided by the speed-up that
is asked for, or their times themselves. `floor`: the larger of bytes over the copy rate and operations over the bf16
rate, both of this run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import torch

from bench import (
    kernels_decode,
    kernels_dense_decode,
    kernels_ep,
    kernels_gemm,
    kernels_indexer,
    kernels_prefill,
    kernels_select,
    kernels_tile,
    kernels_tile_mix,
)
from bench.arguments import Parser, new_file
from bench.kernels_timing import Ceilings, measure_ceilings, median_us
from bench.table import Row, report
from kernels.cuda.driver import compile_ahead

Rows: TypeAlias = Callable[[Ceilings, int], Iterator[Row]]
Sources: TypeAlias = Callable[[], list[tuple[Path, str, dict[str, int]]]]

# A group: what it times, and what is to be compiled before CUDA is used (Triton compiles on demand).
GROUPS: dict[str, tuple[tuple[Rows, ...], Sources]] = {
    "select": ((kernels_select.select_rows,), kernels_select.sources),
    "indexer": ((kernels_indexer.indexer_rows,), kernels_indexer.sources),
    "decode": ((kernels_decode.decode_rows,), kernels_decode.sources),
    "dense": ((kernels_dense_decode.dense_rows,), kernels_dense_decode.sources),
    "prefill": ((kernels_prefill.prefill_rows,), kernels_prefill.sources),
    "tile": ((kernels_tile.tile_rows, kernels_tile_mix.mix_rows), kernels_tile_mix.sources),
    "ep": ((kernels_ep.ep_rows,), list),
    "gemm": ((kernels_gemm.gemm_rows,), kernels_gemm.sources),
}


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=new_file, default=None)
    parser.add_argument("--only", choices=tuple(GROUPS), action="append", help="a group of kernels (default: all)")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    groups = tuple(options.only or GROUPS)
    started = time.perf_counter()
    compile_sources(groups)
    rows = [Row("compiling ahead", time.perf_counter() - started, "s")]
    for row in measured(groups, options.seed):
        print(f"{row.name}: {row.value:.4g} {row.unit} {row.verdict}", flush=True)  # a run that is cut short has told
        rows.append(row)
    return report(torch.cuda.get_device_name(), rows, options.json)


def compile_sources(groups: Iterable[str]) -> dict[str, str]:
    """Reports of the compiler, by kernel. Before anything else uses CUDA: processes are forked."""
    wanted = [source for group in groups for source in GROUPS[group][1]()]
    return compile_ahead(wanted, os.cpu_count() or 1)


def measured(groups: Iterable[str], seed: int) -> Iterator[Row]:
    ceilings: Ceilings = measure_ceilings()
    yield Row("ceiling: copy", ceilings.gb_per_s, "GB/s")
    yield Row("ceiling: bf16 8192^3", ceilings.tflop_per_s, "TFLOP/s")
    yield Row("empty pair of events", median_us(lambda: None), "us")
    for group in groups:
        for rows in GROUPS[group][0]:
            yield from rows(ceilings, seed)


if __name__ == "__main__":
    sys.exit(main())
