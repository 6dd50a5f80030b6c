"""Sparse decode beside its bars. Knows its shapes; the clock is elsewhere."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.kernels_timing import Ceilings, median_us
from bench.table import Row
from kernels.cuda.spans import Split, Workspace, workspace_for
from kernels.cuda.sparse_decode import SOURCE, defines_for, padded_keys, sparse_decode, split_for
from kernels.reference.sparse_decode import RecordKind
from kernels.testing.sparse_decode import Case, assert_case, make_case


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

    def case(self, seed: int) -> Case:
        """Operands of this shape."""
        cuda = torch.device("cuda")
        return make_case(self.kinds, self.queries, self.heads, self.counts, self.tokens, 64, cuda, seed)


V4, V32, WINDOW, ENTRY = RecordKind.V4, RecordKind.V32, RecordKind.V41_WINDOW, RecordKind.V41_ENTRY
DECODES = (
    Decode("V4-Flash b128 h64 128+512", (V4, V4), 128, 64, (128, 512), 16_384, 52.7 / 1.5),
    Decode("V3.2 b128 h128 2048", (V32, None), 128, 128, (2048, 0), 32_768, 192.3 / 1.1),
    Decode("V4.1 b128 h64 128+512", (WINDOW, ENTRY), 128, 64, (128, 512), 16_384, None),
    Decode("V4-Flash b128 sq2 h64 128+512", (V4, V4), 256, 64, (128, 512), 16_384, 95.9),
    Decode("V4-Pro b128 sq2 h128 128+1024", (V4, V4), 256, 128, (128, 1024), 16_384, 211.6),
    Decode("V4-Flash b2 h64 128+512", (V4, V4), 2, 64, (128, 512), 16_384, 18.1),
    Decode("V3.2 b128 sq2 h128 2048", (V32, None), 256, 128, (2048, 0), 32_768, 371.3),
    Decode("V3.2 b64 h128 2048", (V32, None), 64, 128, (2048, 0), 32_768, 100.4),
    Decode("V3.2 b128 h64 2048", (V32, None), 128, 64, (2048, 0), 32_768, 122.0),
    Decode("V3.2 b2 h128 2048", (V32, None), 2, 128, (2048, 0), 32_768, 20.8),
    Decode("V4.1 b128 h64 128+1024", (WINDOW, ENTRY), 128, 64, (128, 1024), 16_384, None),
)
COMPARED = DECODES[:3]  # timed in turns, since two of them are divided by each other
_TURNS, _PROCESSORS = 3, 132


def sources() -> list[tuple[Path, str, dict[str, int]]]:
    """What is to be compiled."""
    pairs = dict.fromkeys(shape.kinds for shape in DECODES)
    return [(SOURCE, "sm_90a", defines_for(*pair, split)) for pair in pairs for split in (0, 1)]


def decode_rows(ceilings: Ceilings, seed: int) -> Iterator[Row]:
    """Time, floor and error of every shape, checked first, and V4.1's records against V4's."""
    cases = [shape.case(seed) for shape in COMPARED]
    errors = [_check(shape, case, seed) for shape, case in zip(COMPARED, cases, strict=True)]
    turns = [[_time(case) for case in cases] for _ in range(_TURNS)]
    times = [statistics.median(found) for found in zip(*turns, strict=True)]
    for shape, time_us, error in zip(COMPARED, times, errors, strict=True):
        yield from _rows(shape, ceilings, time_us, error)
    yield Row("V4.1 records over V4 records, 128+512", times[2] / times[0], "x", 1)
    del cases
    for shape in DECODES[len(COMPARED) :]:
        case = shape.case(seed)
        error = _check(shape, case, seed)
        yield from _rows(shape, ceilings, _time(case), error)


def _rows(shape: Decode, ceilings: Ceilings, time_us: float, error: float) -> Iterator[Row]:
    floor = max(shape.bytes / ceilings.gb_per_s / 1e3, shape.operations / ceilings.tflop_per_s / 1e6)
    yield Row(f"sparse decode {shape.name}", time_us, "us", shape.bar_us)
    yield Row("  of floor", 100 * floor / time_us, f"% ({floor:.1f} us), error {error:.1e}")


def _check(shape: Decode, case: Case, seed: int) -> float:
    """The largest relative error, on hostile operands of this shape's records and on `case`."""
    for page, counts in ((1, (1, 65)), (61, (129, 640)), (576, (64, 64))):
        assert_case(make_case(shape.kinds, 7, 70, counts, 2_000, page, case.query.device, seed, hostile=True), _run)
    return assert_case(case, _run)


def _run(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = case.outputs()
    split, room = _split(case)
    room.partial.fill_(torch.nan)
    sparse_decode(case.query, case.main, case.extra, case.sink, case.scale, output, lse, split, room)
    return output, lse


def _time(case: Case) -> float:
    output, lse = case.outputs()
    operands = (case.query, case.main, case.extra, case.sink, case.scale, output, lse, *_split(case))
    return median_us(lambda: sparse_decode(*operands))


def _split(case: Case) -> tuple[Split, Workspace]:
    queries, heads, _ = case.query.shape
    split = split_for(queries, heads, padded_keys(case.main, case.extra), _PROCESSORS)
    return split, workspace_for(split, queries, heads, case.query.device)
