"""Expert choice and exact top-k beside their bars. Knows their shapes; the clock is elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.kernels_rows import checked, timed
from bench.kernels_timing import Ceilings
from bench.table import Row
from kernels.cuda import gate as gating
from kernels.cuda import top_k as selection
from kernels.reference.gate import GateOperands, GateSpec, Score
from kernels.testing.gate import SPECS, assert_case
from kernels.testing.gate import make_case as make_gate
from kernels.testing.top_k import HOSTILE, assert_top_k, make_lengths, make_scores


@dataclass(frozen=True, slots=True)
class Gate:
    """One shape of the gate and the way to choose. `public_us`: TileKernels' fused gate; `wanted`: how much faster it
    has to be, or None."""

    name: str
    spec: GateSpec
    rows: int
    public_us: float | None = None
    wanted: float | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """One shape of exact top-k. `public_us`: TileLang's selector."""

    rows: int
    columns: int
    count: int
    public_us: float
    wanted: float | None = None


FLASH = GateSpec(256, 8, Score.SQRT_SOFTPLUS, scaling=1.5)
GATES = (
    Gate("softplus + bias 8192 x 256 top-8", FLASH, 8192, 20.4, 1.3),
    Gate("softplus + bias 128 x 256 top-8", FLASH, 128, 8.7, 1.3),
    Gate("softplus + bias 8192 x 384 top-6", SPECS["softplus of 384"], 8192, 22.8),
    Gate("sigmoid, 4 of 8 groups, 8192 x 256 top-8", SPECS["sigmoid in groups"], 8192),
    Gate("sigmoid, 4 of 8 groups, 128 x 256 top-8", SPECS["sigmoid in groups"], 128),
    Gate("hash 8192 x 256 top-6", SPECS["hash"], 8192),
)
SELECTIONS = (
    Selection(64, 32_768, 2048, 29.9, 1.5),
    Selection(4096, 65_536, 2048, 1023.6, 1.5),
    Selection(1, 131_072, 2048, 78.1),
    Selection(64, 131_072, 2048, 86.2),
    Selection(4096, 8_192, 512, 220.9),
    Selection(4096, 32_768, 1024, 510.5),
)


def sources() -> list[tuple[Path, str, dict[str, int]]]:
    """What is to be compiled."""
    specs = dict.fromkeys([FLASH, *SPECS.values()])
    found = [(gating.SOURCE, "sm_90", gating.defines_for(spec)) for spec in specs]
    plans = [selection.Plan(cluster, each) for cluster in (1, 2, 4, 8) for each in (8, 128)]
    plans.append(selection.Plan(1, 8, 2))
    return found + [(selection.SOURCE, "sm_90", selection.defines_for(plan)) for plan in plans]


def select_rows(ceilings: Ceilings, seed: int) -> Iterator[Row]:
    """Hostile operands first, then each shape: checked and timed."""
    cuda = torch.device("cuda")
    for name, spec in SPECS.items():
        cases = [make_gate(spec, rows, cuda, rows, hostile=True) for rows in (1, 127, 4096)]
        yield checked(f"gate: {name}, hostile", lambda s=spec, c=cases: [_check_gate(s, given) for given in c])
    for kind in HOSTILE:
        yield checked(f"top-k: {kind}, hostile", lambda k=kind: _check_top_k(k, seed))
    for shape in GATES:
        yield from _gate_rows(shape, ceilings, seed)
    for selected in SELECTIONS:
        yield from _selection_rows(selected, ceilings, seed)


def _check_gate(spec: GateSpec, given: GateOperands) -> None:
    assert_case(spec, given, lambda operands: _gate(spec, operands))


def _check_top_k(kind: str, seed: int) -> None:
    cuda = torch.device("cuda")
    for columns in (3, 8_193, 65_536, 65_540):
        scores = make_scores(kind, 14, columns, cuda, seed)
        assert_top_k(scores, 512, None, selection.top_k)
        assert_top_k(scores, 2048, make_lengths(14, columns, cuda), selection.top_k)


def _gate_rows(shape: Gate, ceilings: Ceilings, seed: int) -> Iterator[Row]:
    given = make_gate(shape.spec, shape.rows, torch.device("cuda"), seed)
    yield checked(f"gate {shape.name}: checked", lambda: _check_gate(shape.spec, given))
    experts, weights = _gate(shape.spec, given)
    floor = shape.rows * (shape.spec.experts * 4 + shape.spec.topk * 8) / ceilings.gb_per_s / 1e3
    bar = shape.public_us / shape.wanted if shape.public_us and shape.wanted else shape.public_us
    yield from timed(f"gate {shape.name}", lambda: gating.gate(shape.spec, given, experts, weights), floor, bar)


def _selection_rows(shape: Selection, ceilings: Ceilings, seed: int) -> Iterator[Row]:
    scores = make_scores("normal", shape.rows, shape.columns, torch.device("cuda"), seed)
    name = f"top-{shape.count} of {shape.columns}, {shape.rows} rows"
    yield checked(f"{name}: checked", lambda: assert_top_k(scores, shape.count, None, selection.top_k))
    found = torch.empty(shape.rows, shape.count, dtype=torch.int32, device="cuda")
    floor = shape.rows * (shape.columns + shape.count) * 4 / ceilings.gb_per_s / 1e3
    bar = shape.public_us / (shape.wanted or 1)
    yield from timed(name, lambda: selection.top_k(scores, None, found), floor, bar)


def _gate(spec: GateSpec, given: GateOperands) -> tuple[torch.Tensor, torch.Tensor]:
    rows = len(given.logits)
    experts = torch.full((rows, spec.topk), -7, dtype=torch.int32, device="cuda")
    weights = torch.full((rows, spec.topk), torch.nan, device="cuda")
    gating.gate(spec, given, experts, weights)
    return experts, weights
