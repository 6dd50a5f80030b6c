"""GPU kernels beside the bars: `python -m bench.kernels`. Exit code 1 where a bar is missed.

Every figure is a median by the device's clock with the L2 flushed, on random operands; before a kernel is timed its
output is compared with the float64 reference on those operands, and its repeats bit for bit. Bars are times of public
kernels, measured on one H200 with the same shapes and the same method, divided by the speed-up that is asked for.
`floor`: the larger of bytes over the copy rate and operations over the bf16 rate, both of this run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.kernels_timing import bf16_tflop_per_s, copy_gb_per_s, median_us
from bench.table import Row, report
from kernels.cuda.sparse_decode import sparse_decode
from kernels.reference.sparse_decode import RecordKind
from kernels.testing.sparse_decode import Case, assert_case, make_case


@dataclass(frozen=True, slots=True)
class Ceilings:
    gb_per_s: float
    tflop_per_s: float


@dataclass(frozen=True, slots=True)
class Decode:
    """One shape of sparse decode; `bar_us` is the public kernel's time over the speed-up asked for."""

    name: str
    kinds: tuple[RecordKind, RecordKind | None]
    queries: int
    heads: int
    counts: tuple[int, int]
    tokens: int
    bar_us: float | None

    @property
    def bytes(self) -> int:
        """Queries, outputs and named records, each once."""
        records = self.counts[0] * self.kinds[0].value + self.counts[1] * (self.kinds[1].value if self.kinds[1] else 0)
        return self.queries * (records + self.heads * 2 * (self.kinds[0].width + 512))

    @property
    def operations(self) -> int:
        return 2 * self.queries * self.heads * sum(self.counts) * (self.kinds[0].width + 512)


V4, V32, WINDOW, ENTRY = RecordKind.V4, RecordKind.V32, RecordKind.V41_WINDOW, RecordKind.V41_ENTRY
DECODES = (
    Decode("V4-Flash b128 h64 128+512", (V4, V4), 128, 64, (128, 512), 16_384, 52.7 / 1.5),
    Decode("V4-Flash b128 sq2 h64 128+512", (V4, V4), 256, 64, (128, 512), 16_384, 95.9),
    Decode("V4-Pro b128 sq2 h128 128+1024", (V4, V4), 256, 128, (128, 1024), 16_384, 211.6),
    Decode("V4-Flash b2 h64 128+512", (V4, V4), 2, 64, (128, 512), 16_384, None),
    Decode("V3.2 b128 h128 2048", (V32, None), 128, 128, (2048, 0), 32_768, 192.3 / 1.1),
    Decode("V3.2 b128 sq2 h128 2048", (V32, None), 256, 128, (2048, 0), 32_768, 371.3),
    Decode("V3.2 b64 h128 2048", (V32, None), 64, 128, (2048, 0), 32_768, 100.4),
    Decode("V3.2 b128 h64 2048", (V32, None), 128, 64, (2048, 0), 32_768, 122.0),
    Decode("V3.2 b2 h128 2048", (V32, None), 2, 128, (2048, 0), 32_768, None),
    Decode("V4.1 b128 h64 128+512", (WINDOW, ENTRY), 128, 64, (128, 512), 16_384, None),
    Decode("V4.1 b128 h64 128+1024", (WINDOW, ENTRY), 128, 64, (128, 1024), 16_384, None),
)


def decode_rows(ceilings: Ceilings, seed: int) -> Iterator[Row]:
    """Time, floor and error of every shape of sparse decode, and V4.1's records against V4's."""
    found = {}
    for shape in DECODES:
        case = make_case(shape.kinds, shape.queries, shape.heads, shape.counts, shape.tokens, 64,
                         torch.device("cuda"), seed)  # fmt: skip
        error = assert_case(case, run_decode)
        output, lse = case.outputs()
        operands = (case.query, case.main, case.extra, case.sink, case.scale, output, lse)
        time_us = found[shape.name] = median_us(lambda given=operands: sparse_decode(*given))
        floor = max(shape.bytes / ceilings.gb_per_s / 1e3, shape.operations / ceilings.tflop_per_s / 1e6)
        yield Row(f"sparse decode {shape.name}", time_us, "us", shape.bar_us)
        yield Row("  of floor", 100 * floor / time_us, f"% ({floor:.1f} us), error {error:.1e}")
    yield Row("V4.1 records over V4 records, 128+512", found["V4.1 b128 h64 128+512"] / found[DECODES[0].name], "x", 1)


def run_decode(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = case.outputs()
    sparse_decode(case.query, case.main, case.extra, case.sink, case.scale, output, lse)
    return output, lse


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    ceilings = Ceilings(copy_gb_per_s(), bf16_tflop_per_s())
    rows = [
        Row("ceiling: copy", ceilings.gb_per_s, "GB/s"),
        Row("ceiling: bf16 8192^3", ceilings.tflop_per_s, "TFLOP/s"),
        Row("empty pair of events", median_us(lambda: None), "us"),
        *decode_rows(ceilings, options.seed),
    ]
    return report(torch.cuda.get_device_name(), rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
