"""Tolerances of every operator, in one place. Knows how far an implementation may stray from the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bound |found - expected| <= absolute + relative * |expected|."""

    absolute: float
    relative: float


# fp32 sums in another order; the operands of the generators are of order one.
_FP32 = Tolerance(2e-5, 2e-5)
# One unit in the last place of bf16 where a value lies next to a rounding boundary.
_BF16 = Tolerance(1e-4, 2.0**-7)
TOLERANCES = {
    "linear": _FP32,
    "norm": _FP32,
    "memory": _FP32,
    "hyper": _FP32,
    "latent": _FP32,
    "compress": Tolerance(5e-5, 5e-5),
    "attend": Tolerance(5e-5, 5e-5),
    "route": _FP32,
    "experts": Tolerance(1e-4, 1e-4),
    "bf16": _BF16,
    "layer": Tolerance(2e-4, 2e-4),
    # Operands are rounded between its operators: a value beside a boundary moves all that follow.
    "bf16 layer": Tolerance(4e-2, 2.0**-6),
}


def assert_close(operator: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """AssertionError, saying where and by how much, if `found` strays further than `operator` may. NaN always does."""
    if found.shape != expected.shape:
        raise AssertionError(f"{operator}: shape {list(found.shape)}, expected {list(expected.shape)}")
    tolerance = TOLERANCES[operator]
    found, expected = found.to(torch.float64), expected.to(torch.float64)
    excess = (found - expected).abs() - tolerance.absolute - tolerance.relative * expected.abs()
    wrong = ~(excess <= 0)
    if bool(wrong.any()):
        at = tuple(torch.nonzero(wrong)[0].tolist())
        raise AssertionError(
            f"{operator}: {int(wrong.sum())} of {wrong.numel()} differ, first at {at}: "
            f"{found[at]:.9g}, expected {expected[at]:.9g}"
        )
