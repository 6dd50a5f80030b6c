"""Sparse decode beside its bars, and its variants beside each other. Knows its shapes; the clock is elsewhere."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.kernels_timing import Ceilings, median_us
from bench.table import Row
from kernels.cuda.sparse_decode import DEFAULT, SOURCE, VARIANTS, Variant, defines_for, sparse_decode
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
    Decode("V4-Flash b2 h64 128+512", (V4, V4), 2, 64, (128, 512), 16_384, None),
    Decode("V3.2 b128 sq2 h128 2048", (V32, None), 256, 128, (2048, 0), 32_768, 371.3),
    Decode("V3.2 b64 h128 2048", (V32, None), 64, 128, (2048, 0), 32_768, 100.4),
    Decode("V3.2 b128 h64 2048", (V32, None), 128, 64, (2048, 0), 32_768, 122.0),
    Decode("V3.2 b2 h128 2048", (V32, None), 2, 128, (2048, 0), 32_768, None),
    Decode("V4.1 b128 h64 128+1024", (WINDOW, ENTRY), 128, 64, (128, 1024), 16_384, None),
)
COMPARED = DECODES[:3]
_TURNS = 3


def sources(variants: Sequence[Variant]) -> list[tuple[Path, str, dict[str, int]]]:
    """What is to be compiled."""
    kinds = dict.fromkeys(shape.kinds for shape in DECODES)
    return [(SOURCE, "sm_90a", defines_for(*pair, variant)) for variant in variants for pair in kinds]


def decode_rows(ceilings: Ceilings, seed: int, variant: Variant = DEFAULT) -> Iterator[Row]:
    """Time, floor and error of every shape, and V4.1's records against V4's."""
    found = {}
    for shape in DECODES:
        case = shape.case(seed)
        error = assert_case(case, partial(_run, variant))
        time_us = found[shape.name] = _time(case, variant)
        floor = max(shape.bytes / ceilings.gb_per_s / 1e3, shape.operations / ceilings.tflop_per_s / 1e6)
        yield Row(f"sparse decode {shape.name}", time_us, "us", shape.bar_us)
        yield Row("  of floor", 100 * floor / time_us, f"% ({floor:.1f} us), error {error:.1e}")
    yield Row("V4.1 records over V4 records, 128+512", found[COMPARED[2].name] / found[COMPARED[0].name], "x", 1)


def variant_rows(ceilings: Ceilings, seed: int) -> Iterator[Row]:
    """Every variant on the shapes with bars, checked on hostile operands and on these, then timed in turns; all shapes
    with the fastest of them."""
    cases = [shape.case(seed) for shape in COMPARED]
    times: dict[Variant, list[list[float]]] = {}
    for variant in VARIANTS:
        wrong = _check(variant, cases, seed)
        if wrong:
            yield Row(f"{_name(variant)}: {wrong}", float("nan"), "wrong", 0)
            continue
        times[variant] = [[_time(case, variant)] for case in cases]
        for shape, (first,) in zip(COMPARED, times[variant], strict=True):
            yield Row(f"{_name(variant)}: {shape.name}, first turn", first, "us")
    for _ in range(_TURNS - 1):
        for variant, found in times.items():
            for turns, case in zip(found, cases, strict=True):
                turns.append(_time(case, variant))
    middle = {variant: [statistics.median(turns) for turns in found] for variant, found in times.items()}
    for variant, medians in middle.items():
        for shape, time_us in zip(COMPARED, medians, strict=True):
            yield Row(f"{_name(variant)}: {shape.name}", time_us, "us", shape.bar_us)
        yield Row(f"{_name(variant)}: V4.1 records over V4 records", medians[2] / medians[0], "x", 1)
    if middle:
        best = min(middle, key=lambda variant: math.prod(middle[variant]))
        mean = math.prod(middle[best]) ** (1 / len(cases))
        yield Row(f"fastest: {_name(best)}; all shapes with it", mean, "us, mean")
        yield from decode_rows(ceilings, seed, best)


def _check(variant: Variant, cases: Sequence[Case], seed: int) -> str:
    """What is wrong on hostile operands or on these, or nothing."""
    try:
        for shape, case in zip(COMPARED, cases, strict=True):
            for page, counts in ((1, (1, 65)), (61, (129, 640)), (576, (64, 64))):
                small = make_case(shape.kinds, 7, 70, counts, 2_000, page, torch.device("cuda"), seed, hostile=True)
                assert_case(small, partial(_run, variant))
            assert_case(case, partial(_run, variant))
    except AssertionError as wrong:
        return str(wrong)
    return ""


def _run(variant: Variant, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = case.outputs()
    sparse_decode(case.query, case.main, case.extra, case.sink, case.scale, output, lse, variant)
    return output, lse


def _time(case: Case, variant: Variant) -> float:
    output, lse = case.outputs()
    operands = (case.query, case.main, case.extra, case.sink, case.scale, output, lse, variant)
    return median_us(lambda: sparse_decode(*operands))


def _name(variant: Variant) -> str:
    flags = {"folded": variant.folded, "held": variant.held, "ahead": variant.ahead}
    words = [word for word, given in flags.items() if given] or ["plain"]
    return " ".join([*words, str(variant.parts)])
