"""Operands of a router's gate, friendly and hostile, and the check against float64. Knows no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kernels.reference.gate import GateOperands, GateSpec, Score, gate, scores_of

# Of fp32 scores: choices closer than this may fall either way, and such rows are left out, but no more than one in 20.
CLOSE, WEIGHTS = 2e-6, 2e-5
Run = Callable[[GateOperands], tuple[Tensor, Tensor]]
SPECS = {
    "softmax": GateSpec(64, 6, Score.SOFTMAX, normalized=False),
    "softmax in groups": GateSpec(160, 6, Score.SOFTMAX, 8, 3, 1, normalized=False, scaling=16.0),
    "sigmoid in groups": GateSpec(256, 8, Score.SIGMOID, 8, 4, 2, scaling=2.5),
    "softplus": GateSpec(256, 8, Score.SQRT_SOFTPLUS, scaling=1.5),
    "softplus of 384": GateSpec(384, 6, Score.SQRT_SOFTPLUS, scaling=2.5),
    "odd": GateSpec(77, 5, Score.SIGMOID, 7, 3, 11),
    "hash": GateSpec(256, 6, Score.SQRT_SOFTPLUS, scaling=1.5, hashed=True),
}


def make_case(spec: GateSpec, rows: int, device: torch.device, seed: int, hostile: bool = False) -> GateOperands:
    """Random logits, with a bias, a table and replicas. Hostile: few distinct values, all equal, infinities, NaN."""
    draw = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(rows, spec.experts, generator=draw, device=device)
    bias = torch.randn(spec.experts, generator=draw, device=device) / 8
    if hostile:
        # Sums over a group's best are equal where their terms are, not by symmetry or another order of terms.
        logits, bias = (logits * 2).round() / 2 + 0.1, torch.zeros_like(bias)
        logits[::5] = 0.5
        logits[1::5, ::3] = -torch.inf
        logits[2::5, 7] = torch.inf
        logits[3::5, 5::9] = torch.nan
    given = GateOperands(logits, bias=None if spec.score is Score.SOFTMAX else bias)
    if spec.hashed:
        table = torch.rand(99, spec.experts, generator=draw, device=device).topk(spec.topk).indices.int().contiguous()
        tokens = torch.randint(0, 99, (rows,), generator=draw, device=device)
        return replace(given, table=table, tokens=tokens)
    counts = torch.randint(1, 5, (spec.experts,), generator=draw, device=device, dtype=torch.int32)
    place = torch.arange(4, device=device)
    physical = (counts.cumsum(0)[:, None] - counts[:, None] + place).int().where(place < counts[:, None], -1)
    return replace(given, replicas=physical.int().contiguous(), replica_counts=counts)


def assert_case(spec: GateSpec, given: GateOperands, run: Run) -> float:
    """Runs twice and compares with float64. Returns the largest relative error of a weight; AssertionError beyond."""
    experts, weights = run(given)
    again, weights_again = run(given)
    if not torch.equal(experts, again) or not _same(weights, weights_again):
        raise AssertionError("a repeated call gave other bits")
    precise = replace(given, logits=given.logits.double())
    expected, expected_weights = gate(spec, precise)
    clear = ~_close(spec, precise)
    if float(clear.double().mean()) < 0.95:
        raise AssertionError(f"only {int(clear.sum())} of {len(clear)} rows have clear choices")
    wrong = (experts != expected).any(1) & clear
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise AssertionError(f"row {row}: experts {experts[row].tolist()}, expected {expected[row].tolist()}")
    found, wanted = weights[clear].double(), expected_weights[clear]
    if not torch.equal(found.isnan(), wanted.isnan()) or not torch.equal(found.isinf(), wanted.isinf()):
        raise AssertionError("NaN or infinity in other places")
    finite = wanted.isfinite()
    error = ((found - wanted).abs() / (wanted.abs() + 1e-12))[finite]
    worst = float(error.max()) if error.numel() else 0.0
    if not worst <= WEIGHTS:
        raise AssertionError(f"a weight is off by {worst:.3g} of its value")
    return worst


def _close(spec: GateSpec, given: GateOperands) -> Tensor:
    """bool [rows]: unequal scores beside each other, among the best or at the border of the kept groups."""
    if spec.hashed:
        return torch.zeros(len(given.logits), dtype=torch.bool, device=given.logits.device)
    scores = scores_of(spec, given.logits)
    biased = scores if given.bias is None else scores + given.bias
    close = _beside(biased, spec.topk * spec.groups)
    if spec.kept_groups < spec.groups:
        best = biased.unflatten(1, (spec.groups, -1)).topk(spec.group_best, -1).values.sum(-1)
        close |= _beside(best, spec.groups)
    return close


def _beside(values: Tensor, most: int) -> Tensor:
    best = values.topk(min(most + 1, values.shape[1]), 1).values
    gap = best[:, :-1] - best[:, 1:]
    return ((gap > 0) & (gap < CLOSE * best[:, :-1].abs())).any(1)


def _same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))
