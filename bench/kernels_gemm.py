"""Block-scaled products beside their bars. Knows their shapes; the clock is elsewhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import kernels_read
from bench.kernels_timing import Ceilings, median_us, rested_us
from bench.table import Row
from kernels.cuda.gemm import gemm, source_for
from kernels.cuda.gemm_choice import Large, Stream, choose_cut
from kernels.cuda.gemm_pack import pack_fp4
from kernels.reference.gemm import Fp4Weights
from kernels.testing.gemm import FORMATS, RELATIVE, Case, assert_case, make_case, make_contiguous


@dataclass(frozen=True, slots=True)
class Product:
    """One shape. `public_us`: DeepGEMM's FP8 kernel; `wanted`: how much faster ours has to be. `tokens`: of a group, on
    average where there are several."""

    layout: str
    form: str
    groups: int
    tokens: int
    rows: int
    channels: int
    public_us: float | None
    wanted: float | None = None
    total: int | None = None  # tokens of all groups where the public kernel was timed

    @property
    def name(self) -> str:
        groups = "" if self.layout == "dense" else f" {self.groups} groups of"
        return f"{self.layout} {self.form}{groups} m{self.tokens} n{self.rows} k{self.channels}"

    @property
    def cut(self) -> Stream | Large:
        masked = self.layout == "masked"
        return choose_cut(self.rows, self.channels, self.groups, self.tokens, *_kind(self.form), masked)

    def counts(self) -> list[int]:
        """Tokens of each group."""
        if self.layout == "dense":
            return [self.tokens]
        draw = random.Random(self.tokens)
        counts = [int(self.tokens * draw.uniform(0.7, 1.3)) for _ in range(self.groups)]
        if self.total is not None:
            counts = [count * self.total // sum(counts) for count in counts]
            counts[0] += self.total - sum(counts)
        return counts

    def case(self, seed: int) -> Case:
        """Operands of this shape."""
        cuda, counts = torch.device("cuda"), self.counts()
        if self.layout == "contiguous":
            return make_contiguous(self.form, counts, self.rows, self.channels, cuda, seed)
        given = None if self.layout == "dense" else torch.tensor(counts, dtype=torch.int32, device=cuda)
        capacity = max(counts) if self.layout == "dense" else -(-max(counts) // 64) * 64
        return make_case(self.form, self.groups, capacity, self.rows, self.channels, cuda, seed, given)

    @property
    def bytes(self) -> float:
        """Operands and output, each once."""
        used, tokens = sum(count > 0 for count in self.counts()), sum(self.counts())
        weight = self.rows * self.channels * (17 / 32 if self.form == "fp4" else 1)
        return used * weight + tokens * (self.channels * (1 + 4 / 128) + 2 * self.rows)

    @property
    def operations(self) -> int:
        return 2 * sum(self.counts()) * self.rows * self.channels


# rows, channels, and DeepGEMM's times at 1, 64, 128, 512 and 4096 tokens
_LAYERS = (
    (2112, 7168, 15.4, 13.2, 14.1, 18.4, 100.6), (24576, 1536, 20.7, 19.7, 20.1, 37.3, 237.5),
    (32768, 512, 11.9, 12.5, 13.4, 23.8, 134.0), (7168, 16384, 44.4, 42.6, 47.1, 125.2, 652.1),
    (4096, 7168, 19.1, 16.9, 17.2, 27.9, 172.4), (7168, 2048, 11.1, 10.8, 12.1, 21.8, 96.8),
    (3072, 7168, 17.4, 14.4, 15.3, 23.2, 131.9), (7168, 3072, 14.2, 13.8, 14.5, 28.5, 136.0),
)  # fmt: skip
_TOKENS = {1: 1.2, 64: 1.2, 128: 1.2, 512: None, 4096: 0.95}
DENSE = tuple(
    Product("dense", "fp8 128", 1, tokens, rows, channels, public[place], wanted)
    for rows, channels, *public in _LAYERS
    for place, (tokens, wanted) in enumerate(_TOKENS.items())
)
FEW = [product for product in DENSE if product.wanted == 1.2]
SHARE_OF_FEW = 0.8  # of the shapes of few tokens that have to reach their bars
GROUPED = (
    Product("masked", "fp8 128", 32, 20, 4096, 7168, 244.8, 0.95, total=602),
    Product("masked", "fp8 128", 32, 20, 7168, 2048, 136.8, 0.95, total=602),
    Product("masked", "fp4", 32, 20, 4096, 7168, 244.8, 1.4, total=602),
    Product("masked", "fp4", 32, 20, 7168, 2048, 136.8, 1.4, total=602),
    Product("masked", "fp8 128", 8, 4, 4096, 7168, 70.6, total=28),
    Product("masked", "fp8 128", 8, 4, 7168, 2048, 43.0, total=28),
    Product("masked", "fp4", 8, 4, 4096, 7168, 70.6, total=28),
    Product("masked", "fp4", 8, 4, 7168, 2048, 43.0, total=28),
    Product("masked", "fp8 128", 32, 192, 4096, 7168, 370.3, total=5896),
    Product("masked", "fp8 128", 32, 192, 7168, 2048, 209.3, total=5896),
    Product("masked", "fp4", 32, 192, 4096, 7168, 370.3, total=5896),
    Product("masked", "fp8 128", 6, 1024, 4096, 7168, 286.5, total=6108),
    Product("contiguous", "fp8 128", 4, 8192, 4096, 7168, 1412.7, 0.95, total=34151),
    Product("contiguous", "fp8 128", 4, 8192, 7168, 2048, 836.3, 0.95, total=34151),
    Product("contiguous", "fp8 128", 8, 4096, 4096, 7168, 1428.7, 0.95, total=33464),
    Product("contiguous", "fp8 128", 8, 4096, 7168, 2048, 807.8, 0.95, total=33464),
    Product("contiguous", "fp8 128", 32, 256, 4096, 7168, 481.4, 0.95, total=8747),
    Product("contiguous", "fp8 128", 32, 256, 7168, 2048, 260.6, 0.95, total=8747),
    Product("dense", "fp8 32", 1, 1, 4096, 7168, None),
    Product("dense", "fp8 32", 1, 64, 4096, 7168, None),
    Product("dense", "fp8 32", 1, 128, 4096, 7168, None),
)
# Hostile operands are cut in every way that is timed.
_HOSTILE = ((5, 70, 384, 512), (3, 9, 2112, 1024))


def sources() -> list[tuple[Path, str, dict[str, int]]]:
    """What is to be compiled."""
    cuts = [(product.cut, product.form, product.layout == "dense") for product in (*DENSE, *GROUPED)]
    cuts += [(choose_cut(rows, channels, groups, tokens, *_kind(form), True), form, False)
             for groups, tokens, rows, channels in _HOSTILE for form in FORMATS]  # fmt: skip
    return kernels_read.sources() + [source_for(cut, *_kind(form), dense) for cut, form, dense in dict.fromkeys(cuts)]


def gemm_rows(ceilings: Ceilings, seed: int) -> Iterator[Row]:
    """Hostile operands first, then each shape: checked and timed."""
    rate = fp8_tflop_per_s()
    yield Row("ceiling: FP8 8192^3", rate, "TFLOP/s")
    for groups, tokens, rows, channels in _HOSTILE:
        for form in FORMATS:
            case = make_case(form, groups, tokens, rows, channels, torch.device("cuda"), seed, hostile=True)
            cut = choose_cut(rows, channels, groups, tokens, *_kind(form), True)
            yield Row(f"{form}, {groups} groups of up to {tokens}, hostile: error", _check(case, cut), "", RELATIVE)
    reached = out_of_reach = 0
    for product in (*DENSE, *GROUPED):
        found = list(_rows(product, ceilings, rate, seed))
        yield from found
        if product in FEW:
            least = _reading_us(product, ceilings, seed)
            reached, out_of_reach = reached + found[0].holds, out_of_reach + ((found[0].bar or 0) < least)
            yield Row("  of reading weights and writing", 100 * least / found[0].value, f"% ({least:.1f} us)")
    yield Row("shapes of 1 to 128 tokens at 1.2x", reached, f"of {len(FEW)}", SHARE_OF_FEW * len(FEW), ">=")
    yield Row("  bars below reading weights and writing", out_of_reach, f"of {len(FEW)}")


def _reading_us(product: Product, ceilings: Ceilings, seed: int) -> float:
    """What reading the weights takes, and writing the output at the copy rate: no kernel of this shape takes less."""
    weights = product.case(seed).weights
    return kernels_read.reading_us(weights.codes) + 2 * product.tokens * product.rows / ceilings.gb_per_s / 1e3


def fp8_tflop_per_s() -> float:
    """Rate of an 8192^3 FP8 product of random numbers by the vendor's library, one scale a tensor."""
    a, b = (torch.randn(8192, 8192, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")

    def work() -> None:
        torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return 2 * 8192**3 / median_us(work, 10) / 1e6


def _rows(product: Product, ceilings: Ceilings, rate: float, seed: int) -> Iterator[Row]:
    case = product.case(seed)
    try:
        error = _check(case, product.cut)
    except AssertionError as wrong:
        yield Row(f"{product.name}: {wrong}", 1, "wrong", 0)
        return
    weights = pack_fp4(case.weights) if isinstance(case.weights, Fp4Weights) else case.weights
    operands = (case.activations, weights, case.counts, case.experts, case.output(), product.cut)
    timed_us = rested_us if isinstance(product.cut, Large) else median_us  # few tokens are bound by memory
    time_us = timed_us(lambda: gemm(*operands))
    bar = product.public_us / (product.wanted or 1) if product.public_us else None
    floor = max(product.bytes / ceilings.gb_per_s / 1e3, product.operations / rate / 1e6)
    yield Row(product.name, time_us, "us", bar)
    yield Row("  of floor", 100 * floor / time_us, f"% ({floor:.1f} us), error {error:.1e}")


def _check(case: Case, cut: Stream | Large) -> float:
    weights = pack_fp4(case.weights) if isinstance(case.weights, Fp4Weights) else case.weights

    def run(given: Case) -> torch.Tensor:
        output = given.output()
        gemm(given.activations, weights, given.counts, given.experts, output, cut)
        return output

    return assert_case(case, run)


def _kind(form: str) -> tuple[bool, int]:
    """Whether weights are FP4, and the side of the square that shares a scale."""
    return form == "fp4", 32 if form == "fp8 32" else 128
