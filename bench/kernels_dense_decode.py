"""Dense decode beside its bars. Knows its shapes; the clock is elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.kernels_timing import Ceilings, median_us
from bench.table import Row
from kernels.cuda.dense_decode import SOURCE, defines_for, dense_decode
from kernels.cuda.spans import Split, fast_split, invariant_split
from kernels.cuda.spans import workspace_for as room_for
from kernels.reference.dense_decode import WIDTH
from kernels.testing.dense_decode import Case, assert_case, make_case

_PROCESSORS = 132
_HOSTILE = ((1, (0, 1, 130, 700)), (61, (3, 64, 0, 1_000)), (64, (128, 65, 2_047, 1)), (576, (575, 577, 64, 4_000)))


@dataclass(frozen=True, slots=True)
class Dense:
    """One shape of dense decode; `bar_us` is the public kernel's time over the speed-up asked for."""

    batch: int
    tokens: int
    heads: int
    length: int
    bar_us: float | None

    @property
    def name(self) -> str:
        return f"b{self.batch} sq{self.tokens} h{self.heads} sk{self.length}"

    @property
    def bytes(self) -> int:
        """Keys, queries and outputs, each once."""
        rows = self.tokens * self.heads * (WIDTH + 512)
        return self.batch * 2 * (self.length * WIDTH + rows)

    @property
    def operations(self) -> int:
        return 2 * self.batch * self.tokens * self.heads * self.length * (WIDTH + 512)

    def case(self, seed: int) -> Case:
        """Operands of this shape."""
        return make_case((self.length,) * self.batch, self.tokens, self.heads, 64, torch.device("cuda"), seed)

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
)


def sources() -> list[tuple[Path, str, dict[str, int]]]:
    """What is to be compiled."""
    return [(SOURCE, "sm_90a", defines_for(ahead)) for ahead in (0, 1)]


def dense_rows(ceilings: Ceilings, seed: int) -> Iterator[Row]:
    """Time, floor and error of every shape, checked first, and what the split that suits every batch costs."""
    for page, lengths in _HOSTILE:
        for tokens, heads in ((1, 16), (4, 16), (2, 70), (1, 128)):
            case = make_case(lengths, tokens, heads, page, torch.device("cuda"), seed + page, hostile=True)
            for split in (Split(4_096, 1), Split(128, 32)):
                assert_case(case, partial(run, split=split))
    for shape in DENSES:
        case = shape.case(seed)
        floor = max(shape.bytes / ceilings.gb_per_s / 1e3, shape.operations / ceilings.tflop_per_s / 1e6)
        error = assert_case(case, partial(run, split=shape.fast()))
        time_us = timed(case, shape.fast())
        yield Row(f"dense decode {shape.name}", time_us, "us", shape.bar_us)
        yield Row("  of floor", 100 * floor / time_us, f"% ({floor:.1f} us), error {error:.1e}")
        invariant = invariant_split(shape.length)
        assert_case(case, partial(run, split=invariant))
        yield Row("  the same bits in every batch", timed(case, invariant), "us")
        del case


def run(case: Case, split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of one call."""
    output, lse = case.outputs()
    workspace = room_for(split, case.query.shape[0], case.query.shape[1] * case.query.shape[2], case.query.device)
    workspace.partial.fill_(torch.nan)
    dense_decode(case.query, case.cache, case.scale, split, workspace, output, lse)
    return output, lse


def timed(case: Case, split: Split) -> float:
    """Median microseconds of a call."""
    output, lse = case.outputs()
    workspace = room_for(split, case.query.shape[0], case.query.shape[1] * case.query.shape[2], case.query.device)
    operands = (case.query, case.cache, case.scale, split, workspace, output, lse)
    return median_us(lambda: dense_decode(*operands))
