"""Dense decode beside its bars. Knows its shapes; the clock is elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.kernels_timing import Ceilings, rested_us
from bench.table import Row
from kernels.cuda import dense_decode, dense_decode_fp8
from kernels.cuda.spans import Split, Workspace, fast_split, invariant_split, workspace_for
from kernels.reference.dense_decode import WIDTH, PagedRecords
from kernels.testing.attention import BF16
from kernels.testing.dense_decode import FP8, Case, assert_case, make_case, make_record_case

_PROCESSORS, RECORD = 132, dense_decode_fp8.RECORD
_HOSTILE = ((1, (0, 1, 130, 700)), (61, (3, 64, 0, 1_000)), (64, (128, 65, 2_047, 1)), (576, (575, 577, 64, 4_000)))


@dataclass(frozen=True, slots=True)
class Dense:
    """One shape of dense decode; `bar_us` is the public kernel's time over the speed-up asked for."""

    batch: int
    tokens: int
    heads: int
    length: int
    bar_us: float | None
    records: bool = False  # FP8 records of 656 bytes instead of bf16

    @property
    def name(self) -> str:
        return f"{'FP8 ' * self.records}b{self.batch} sq{self.tokens} h{self.heads} sk{self.length}"

    @property
    def bytes(self) -> int:
        """Keys, queries and outputs, each once."""
        rows = self.tokens * self.heads * 2 * (WIDTH + 512)
        return self.batch * (self.length * (RECORD if self.records else 2 * WIDTH) + rows)

    @property
    def operations(self) -> int:
        return 2 * self.batch * self.tokens * self.heads * self.length * (WIDTH + 512)

    def floor_us(self, ceilings: Ceilings) -> float:
        """FP8 products count half."""
        operations = self.operations / (2 if self.records else 1)
        return max(self.bytes / ceilings.gb_per_s / 1e3, operations / ceilings.tflop_per_s / 1e6)

    def case(self, seed: int) -> Case:
        """Operands of this shape."""
        make = make_record_case if self.records else make_case
        return make((self.length,) * self.batch, self.tokens, self.heads, 64, torch.device("cuda"), seed)

    def fast(self) -> Split:
        return fast_split(self.batch, self.tokens * self.heads, self.length, _PROCESSORS)


DENSES = (
    Dense(128, 1, 128, 4_096, 237.6 / 0.95),
    Dense(128, 1, 16, 8_192, 316.0),
    Dense(128, 1, 64, 8_192, 318.5),
    Dense(128, 2, 128, 4_096, 435.9 / 0.95),
    Dense(64, 1, 128, 4_096, 130.0 / 0.95),
    Dense(1, 1, 128, 65_536, 66.1 / 0.95),
    Dense(8, 1, 16, 131_072, 318.8),
    Dense(128, 1, 128, 8_192, 458.7 / 0.95),
    Dense(128, 2, 128, 8_192, 820.2 / 0.95),
    Dense(32, 1, 128, 65_536, 860.8 / 0.95),
    Dense(128, 1, 128, 32_768, 1718.9 / 0.95),
    Dense(128, 1, 16, 8_192, 224.3 / 1.2, records=True),
    Dense(128, 1, 128, 4_096, 230.6 / 1.1, records=True),
    Dense(128, 1, 128, 8_192, 427.5 / 1.1, records=True),
    Dense(128, 2, 128, 4_096, 439.2 / 1.1, records=True),
    Dense(1, 1, 128, 65_536, 47.2 / 1.1, records=True),
)


def sources() -> list[tuple[Path, str, dict[str, int]]]:
    """What is to be compiled."""
    kernels = [dense_decode.kernel_of(cluster) for cluster in (1, 2)]
    kernels += [dense_decode_fp8.kernel_of(columns) for columns in dense_decode_fp8.COLUMNS]
    kernels.append(dense_decode_fp8.kernel_of(dense_decode_fp8.COLUMNS[1], 2))
    return [(kernel.source, "sm_90a", dict(kernel.defines)) for kernel in kernels]


def dense_rows(ceilings: Ceilings, seed: int) -> Iterator[Row]:
    """Time, floor and error of every shape, checked first, and what the split that suits every batch costs."""
    check_hostile(seed)
    for shape in DENSES:
        case, split, invariant = shape.case(seed), shape.fast(), invariant_split(shape.length)
        error = check(case, split)
        time_us = timed(case, split)
        floor = shape.floor_us(ceilings)
        yield Row(f"dense decode {shape.name}", time_us, "us", shape.bar_us)
        yield Row("  of floor", 100 * floor / time_us, f"% ({floor:.1f} us), error {error:.1e}")
        check(case, invariant)
        yield Row("  the same bits in every batch", timed(case, invariant), "us")
        del case


def check_hostile(seed: int) -> None:
    """AssertionError where hostile operands go wrong."""
    for page, lengths in _HOSTILE:
        for tokens, heads in ((1, 16), (4, 16), (2, 70), (1, 128)):
            for make in (make_case, make_record_case):
                case = make(lengths, tokens, heads, page, torch.device("cuda"), seed + page, hostile=True)
                for split in (Split(4_096, 1), Split(128, 32)):
                    check(case, split)


def check(case: Case, split: Split) -> float:
    """The relative error; AssertionError beyond tolerance."""
    tolerance = FP8 if isinstance(case.cache, PagedRecords) else BF16
    return assert_case(case, partial(run, split=split), tolerance)


def run(case: Case, split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of one call."""
    output, lse = case.outputs()
    workspace = _room(case, split)
    workspace.partial.fill_(torch.nan)
    launch(case, split, workspace, output, lse)
    return output, lse


def timed(case: Case, split: Split) -> float:
    """Median microseconds of a call."""
    output, lse = case.outputs()
    workspace = _room(case, split)
    return rested_us(lambda: launch(case, split, workspace, output, lse))


def launch(case: Case, split: Split, workspace: Workspace, output: torch.Tensor, lse: torch.Tensor) -> None:
    """One call of the kernel that reads the case's keys."""
    if isinstance(case.cache, PagedRecords):
        dense_decode_fp8.dense_decode_fp8(case.query, case.cache, case.scale, split, workspace, output, lse)
    else:
        dense_decode.dense_decode(case.query, case.cache, case.scale, split, workspace, output, lse)


def _room(case: Case, split: Split) -> Workspace:
    batch, tokens, heads, _ = case.query.shape
    return workspace_for(split, batch, tokens * heads, case.query.device)
