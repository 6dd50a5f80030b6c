"""Index scores beside their bars. Knows their shapes; the clock is elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.kernels_rows import checked, timed
from bench.kernels_timing import Ceilings, median_us
from bench.table import Row
from kernels.cuda import indexer_top_k as choosing
from kernels.cuda import mqa_logits as scoring
from kernels.reference.mqa_logits import MqaOperands
from kernels.testing.indexer_top_k import assert_best
from kernels.testing.mqa_logits import assert_logits, make_paged, make_ragged

SLOWER = 0.95  # of DeepGEMM's speed is asked for
FASTER, CHOSEN = 1.3, 2048  # of DeepGEMM's time and torch.topk's, for as many keys
FP8_OVER_BF16 = 1502 / 785  # rates of cuBLASLt on random data, measured in one run on such a GPU
POOL = 1 << 16  # pages of the paged shapes, as many as were there when DeepGEMM was timed


@dataclass(frozen=True, slots=True)
class Shape:
    """`sequences` 0: ragged, the last `tokens` of `keys` positions. `public_us`: DeepGEMM's time."""

    name: str
    sequences: int
    tokens: int
    keys: int
    heads: int
    public_us: float

    def make(self, seed: int) -> tuple[MqaOperands, int]:
        """Operands and the columns."""
        cuda = torch.device("cuda")
        if not self.sequences:
            return make_ragged(self.tokens, self.keys, self.heads, cuda, seed), self.keys
        lengths = torch.full((self.sequences,), self.keys)
        return make_paged(lengths, self.tokens, self.heads, 64, cuda, seed, POOL)

    def make_small(self) -> MqaOperands:
        """As many tokens of a sequence, of few keys and without a GPU."""
        cpu = torch.device("cpu")
        if not self.sequences:
            return make_ragged(min(self.tokens, 64), 64, self.heads, cpu, 0)
        return make_paged(torch.tensor([64]), self.tokens, self.heads, 64, cpu, 0)[0]


SHAPES = (
    Shape("ragged 2,048 x 8,192, 64 heads", 0, 2048, 8192, 64, 233.7),
    Shape("ragged 4,096 x 65,536, 64 heads", 0, 4096, 65_536, 64, 3866.1),
    Shape("ragged 4,096 x 65,536, 32 heads", 0, 4096, 65_536, 32, 2276.8),
    Shape("ragged 128 x 65,536, 64 heads", 0, 128, 65_536, 64, 258.8),
    Shape("paged 64 x 1 x 32,768, 64 heads", 64, 1, 32_768, 64, 81.7),
    Shape("paged 128 x 2 x 32,768, 64 heads", 128, 2, 32_768, 64, 158.9),
    Shape("paged 256 x 1 x 65,536, 64 heads", 256, 1, 65_536, 64, 532.0),
    Shape("paged 4 x 1 x 131,072, 64 heads", 4, 1, 131_072, 64, 29.2),
)
CHOICES = (SHAPES[1], SHAPES[4], SHAPES[0], SHAPES[3], SHAPES[5], SHAPES[7])


def sources() -> list[tuple[Path, str, dict[str, int]]]:
    """What is to be compiled."""
    made = [shape.make_small() for shape in SHAPES]
    plans = {scoring.plan_of(given) for given in made}
    found = [(scoring.SOURCE, "sm_90a", scoring.defines_for(plan)) for plan in plans]
    chosen = {choosing.plan_of(shape.make_small()) for shape in CHOICES}
    return found + [(choosing.SOURCE, "sm_90a", choosing.defines_for(plan)) for plan in chosen]


def indexer_rows(ceilings: Ceilings, seed: int) -> Iterator[Row]:
    """Each shape checked and timed."""
    for shape in SHAPES:
        yield from _logits_rows(shape, ceilings, seed)
    for shape in CHOICES:
        yield from _choice_rows(shape, ceilings, seed)


def _logits_rows(shape: Shape, ceilings: Ceilings, seed: int) -> Iterator[Row]:
    given, columns = shape.make(seed)
    yield checked(f"logits {shape.name}: checked", lambda: assert_logits(given, columns, scoring.mqa_logits))
    logits = torch.empty(len(given.ends), columns, device="cuda")
    floor = floor_us(given, shape, ceilings)
    bar = shape.public_us / SLOWER
    yield from timed(f"logits {shape.name}", lambda: scoring.mqa_logits(given, logits), floor, bar)


def _choice_rows(shape: Shape, ceilings: Ceilings, seed: int) -> Iterator[Row]:
    """The bar: DeepGEMM's time for the logits, and that of torch.topk on them in this run."""
    given, columns = shape.make(seed)
    workspace, logits = (
        choosing.workspace_of(torch.device("cuda")),
        torch.zeros(len(given.ends), columns, device="cuda"),
    )
    scoring.mqa_logits(given, logits)
    public_us = shape.public_us + median_us(lambda: logits.topk(CHOSEN), 10)
    yield checked(
        f"top-{CHOSEN} of {shape.name}: checked",
        lambda: assert_best(given, CHOSEN, logits, lambda now, to: choosing.indexer_top_k(now, columns, workspace, to)),
    )
    found = torch.empty(len(given.ends), CHOSEN, dtype=torch.int32, device="cuda")
    yield from timed(
        f"top-{CHOSEN} of {shape.name}",
        lambda: choosing.indexer_top_k(given, columns, workspace, found),
        floor_us(given, shape, ceilings),
        public_us / FASTER,
        "the scores' floor",
    )


def floor_us(given: MqaOperands, shape: Shape, ceilings: Ceilings) -> float:
    """The larger of multiplying and of reading each key of each sequence and writing each score."""
    pairs = int(given.ends.long().sum())
    rate = ceilings.tflop_per_s * FP8_OVER_BF16 * 1e6
    keys = shape.sequences * shape.keys if shape.sequences else shape.keys
    moved = keys * 132 + pairs * 4 + given.queries.numel()
    return max(pairs * shape.heads * 256 / rate, moved / ceilings.gb_per_s / 1e3)
