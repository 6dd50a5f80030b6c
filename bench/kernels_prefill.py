"""Sparse prefill beside its bars. Knows its shapes; the clock is elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.kernels_timing import Ceilings, rested_us
from bench.table import Row
from kernels.cuda.sparse_prefill import SOURCE, defines_for, sparse_prefill
from kernels.reference.sparse_prefill import WIDTHS
from kernels.testing.sparse_prefill import Case, assert_case, make_case


@dataclass(frozen=True, slots=True)
class Prefill:
    """One shape of sparse prefill; `public_us` is the public kernel's time."""

    queries: int
    slots: int
    heads: int
    width: int
    listed: int
    public_us: float

    @property
    def name(self) -> str:
        return f"sq{self.queries} skv{self.slots} h{self.heads} d{self.width} topk{self.listed}"

    @property
    def bytes(self) -> int:
        """Queries, outputs, indices and latents, each once."""
        row = self.heads * 2 * (self.width + 512) + 4 * self.listed
        return self.queries * row + min(self.slots, self.queries * self.listed) * 2 * self.width

    @property
    def operations(self) -> int:
        return 2 * self.queries * self.heads * self.listed * (self.width + 512)

    def case(self, seed: int) -> Case:
        """Operands of this shape."""
        cuda = torch.device("cuda")
        return make_case(self.queries, self.heads, self.width, self.listed, self.slots, cuda, seed)


PREFILLS = (
    Prefill(4_096, 8_192, 128, 576, 2_048, 3857.5),
    Prefill(4_096, 8_192, 64, 512, 512, 587.8),
    Prefill(4_096, 65_536, 128, 512, 1_024, 1982.8),
    Prefill(4_096, 65_536, 128, 576, 2_048, 4220.2),
    Prefill(4_096, 131_072, 128, 576, 2_048, 4358.8),
    Prefill(4_096, 65_536, 64, 512, 512, 613.5),
    Prefill(128, 65_536, 128, 576, 2_048, 147.0),
)
_WANTED = 0.95  # of the public kernel's speed


def sources() -> list[tuple[Path, str, dict[str, int]]]:
    """What is to be compiled."""
    return [(SOURCE, "sm_90a", defines_for(width)) for width in WIDTHS]


def prefill_rows(ceilings: Ceilings, seed: int) -> Iterator[Row]:
    """Time, floor and error of every shape, checked first on hostile operands as well."""
    for width in WIDTHS:
        for queries, heads, listed in ((5, 16, 200), (7, 70, 65), (40, 128, 640), (3, 64, 1)):
            case = make_case(queries, heads, width, listed, 2_000, torch.device("cuda"), seed, hostile=True)
            assert_case(case, run)
    for shape in PREFILLS:
        case = shape.case(seed)
        error = assert_case(case, run)
        time_us = timed(case)
        floor = max(shape.bytes / ceilings.gb_per_s / 1e3, shape.operations / ceilings.tflop_per_s / 1e6)
        yield Row(f"sparse prefill {shape.name}", time_us, "us", shape.public_us / _WANTED)
        yield Row("  of floor", 100 * floor / time_us, f"% ({floor:.1f} us), error {error:.1e}")
        del case


def run(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of one call."""
    output, lse = case.outputs()
    sparse_prefill(case.query, case.named, case.sink, case.scale, output, lse)
    return output, lse


def timed(case: Case) -> float:
    """Median microseconds of a call, after a rest."""
    output, lse = case.outputs()
    operands = (case.query, case.named, case.sink, case.scale, output, lse)
    return rested_us(lambda: sparse_prefill(*operands))
