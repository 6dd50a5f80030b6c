"""GPU kernels beside the bars: `python -m bench.kernels`. Exit code 1 where a bar is missed.

Every figure is a median by the device's clock with the L2 flushed, on random operands; before a kernel is timed its
output is compared with the definition on those operands (float64 where it computes), and its repeats bit for bit. Bars
are times of public kernels, measured on one H200 with the same shapes and the same method, divided by the speed-up that
is asked for, or their times themselves. `floor`: the larger of bytes over the copy rate and operations over the bf16
rate, both of this run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

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
from bench.kernels_timing import Ceilings, measure_ceilings, median_us
from bench.table import Row, report
from kernels.cuda.driver import compile_ahead

GROUPS = ("decode", "dense", "prefill", "select", "indexer", "tile", "ep", "gemm")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--only", choices=GROUPS, action="append", help="a group of kernels (default: all)")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    groups = options.only or GROUPS
    started = time.perf_counter()
    compile_sources(groups)
    rows = [Row("compiling ahead", time.perf_counter() - started, "s")]
    for row in measured(groups, options.seed):
        print(f"{row.name}: {row.value:.4g} {row.unit} {row.verdict}", flush=True)  # a run that is cut short has told
        rows.append(row)
    return report(torch.cuda.get_device_name(), rows, options.json)


def compile_sources(groups: tuple[str, ...]) -> dict[str, str]:
    """Reports of the compiler, by kernel. Before anything else uses CUDA."""
    sources = kernels_decode.sources() if "decode" in groups else []
    sources += kernels_dense_decode.sources() if "dense" in groups else []
    sources += kernels_prefill.sources() if "prefill" in groups else []
    sources += kernels_select.sources() if "select" in groups else []
    sources += kernels_indexer.sources() if "indexer" in groups else []
    sources += kernels_gemm.sources() if "gemm" in groups else []
    return compile_ahead(sources, os.cpu_count() or 1)


def measured(groups: tuple[str, ...], seed: int) -> Iterator[Row]:
    ceilings: Ceilings = measure_ceilings()
    yield Row("ceiling: copy", ceilings.gb_per_s, "GB/s")
    yield Row("ceiling: bf16 8192^3", ceilings.tflop_per_s, "TFLOP/s")
    yield Row("empty pair of events", median_us(lambda: None), "us")
    if "select" in groups:
        yield from kernels_select.select_rows(ceilings, seed)
    if "indexer" in groups:
        yield from kernels_indexer.indexer_rows(ceilings, seed)
    if "decode" in groups:
        yield from kernels_decode.decode_rows(ceilings, seed)
    if "dense" in groups:
        yield from kernels_dense_decode.dense_rows(ceilings, seed)
    if "prefill" in groups:
        yield from kernels_prefill.prefill_rows(ceilings, seed)
    if "tile" in groups:
        yield from kernels_tile.tile_rows(ceilings, seed)
        yield from kernels_tile_mix.mix_rows(ceilings, seed)
    if "ep" in groups:
        yield from kernels_ep.ep_rows(ceilings, seed)
    if "gemm" in groups:
        yield from kernels_gemm.gemm_rows(ceilings, seed)


if __name__ == "__main__":
    sys.exit(main())
