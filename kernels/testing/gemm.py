"""Operands of block-scaled products, friendly and hostile, and the check against float64. Knows no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.gemm import (
    Activations,
    Fp4Weights,
    Fp8Weights,
    dequantize,
    dequantize_activations,
    product,
    quantize_activations,
    quantize_fp4,
    quantize_fp8,
    written,
)

# Of the whole output: rounding to bf16 takes 1.7e-3. Of one value: half a unit in the last place of bf16, and what
# tensor cores drop of the products they add (they keep some 13 bits of the largest).
RELATIVE, OF_VALUE, OF_TERMS = 2.5e-3, 2.0**-8, 2.0**-12
POISON = -77.0  # of output rows that nobody may write
RUN = 128  # tokens: where the next expert's may begin
FORMATS = ("fp8 128", "fp8 32", "fp4")


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Operands of one call."""

    activations: Activations
    weights: Fp8Weights | Fp4Weights
    counts: Tensor | None
    experts: Tensor | None = None

    def output(self) -> Tensor:
        """Poisoned."""
        groups, capacity, _ = self.activations.codes.shape
        shape = (groups, capacity, self.weights.codes.shape[1])
        return torch.full(shape, POISON, dtype=torch.bfloat16, device=self.activations.codes.device)


def make_case(
    form: str, groups: int, capacity: int, rows: int, channels: int, device: torch.device, seed: int,
    counts: Tensor | None = None, hostile: bool = False,
) -> Case:  # fmt: skip
    """Random operands. Hostile: counts from 0 to all, bytes that read as NaN behind them, a token and a row of zeros,
    scales of many sizes, and a token as large as e4m3 goes."""
    draw = torch.Generator(device).manual_seed(seed)
    x = torch.randn(groups, capacity, channels, generator=draw, device=device)
    w = torch.randn(groups, rows, channels, generator=draw, device=device)
    if hostile:
        x *= torch.exp2(torch.randint(-6, 7, (groups, capacity, channels // 128), generator=draw, device=device)
                        .repeat_interleave(128, 2).float())  # fmt: skip
        w *= torch.exp2(torch.randint(-4, 5, (groups, rows, 1), generator=draw, device=device).float())
        x[:, 0], w[:, 1] = 0, 0
        x[:, -1] = torch.where(x[:, -1] > 0, 448.0, -448.0)
        if counts is None:
            counts = torch.randint(0, capacity + 1, (groups,), generator=draw, device=device, dtype=torch.int32)
            counts[0], counts[-1] = 0, capacity
    activations = quantize_activations(x)
    _poison(activations, written(activations, counts, None))
    if form == "fp4":
        return Case(activations, quantize_fp4(w), counts)
    return Case(activations, quantize_fp8(w, int(form.split()[1])), counts)


def make_contiguous(form: str, counts: list[int], rows: int, channels: int, device: torch.device, seed: int) -> Case:
    """Random operands of experts with these counts of tokens, in runs that start at multiples of 128; what lies between
    them reads as NaN."""
    runs = [-(-count // RUN) * RUN for count in counts]
    experts = torch.full((sum(runs),), -1, dtype=torch.int32, device=device)
    for expert, count in enumerate(counts):
        first = sum(runs[:expert])
        experts[first : first + count] = expert
    draw = torch.Generator(device).manual_seed(seed)
    activations = quantize_activations(torch.randn(1, sum(runs), channels, generator=draw, device=device))
    _poison(activations, experts[None] >= 0)
    w = torch.randn(len(counts), rows, channels, generator=draw, device=device)
    weights = quantize_fp4(w) if form == "fp4" else quantize_fp8(w, int(form.split()[1]))
    return Case(activations, weights, None, experts)


def _poison(activations: Activations, valid: Tensor) -> None:
    """Tokens that are not valid, and the padding of scales, become NaN."""
    activations.codes.view(torch.uint8)[~valid] = 0x7F
    activations.scales[..., : valid.shape[1]].mT[~valid] = torch.nan
    activations.scales[..., valid.shape[1] :] = torch.nan


def assert_case(case: Case, run: Callable[[Case], Tensor]) -> float:
    """Runs twice and compares with float64. Returns the relative error (Frobenius); AssertionError beyond tolerance."""
    found = run(case)
    if not torch.equal(found.view(torch.int16), run(case).view(torch.int16)):
        raise AssertionError("a repeated call gave other bits")
    x, w = dequantize_activations(case.activations), dequantize(case.weights)
    expected = product(x, w, case.counts, case.experts)
    valid = written(case.activations, case.counts, case.experts)
    if bool((found[~valid] != POISON).any()):
        raise AssertionError("a token that does not count was written")
    found, expected = found[valid], expected[valid]
    terms = product(x.abs(), w.abs(), case.counts, case.experts)[valid]
    difference = found.to(torch.float64) - expected
    excess = difference.abs() - OF_VALUE * expected.abs() - OF_TERMS * terms
    if not bool((excess <= 0).all()):
        at = tuple(torch.nonzero(~(excess <= 0))[0].tolist())
        raise AssertionError(
            f"{int((~(excess <= 0)).sum())} of {excess.numel()} values, first at {at}: {float(found[at]):.6g}, "
            f"expected {float(expected[at]):.6g}"
        )
    norm = float(expected.norm())
    error = float(difference.norm()) / norm if norm else float(difference.norm())
    if not error <= RELATIVE:
        raise AssertionError(f"relative error {error:.3g}")
    return error
