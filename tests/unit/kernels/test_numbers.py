"""Scalar mathematics of the CPU kernels against torch and float64."""

from __future__ import annotations

import numba
import numpy as np
import torch

from kernels.cpu.numbers import exp, to_bf16

SPECIAL = [0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38, 1.00390625, 1.01171875]


@numba.njit
def _exp_all(values: np.ndarray) -> np.ndarray:
    out = np.empty_like(values)
    for i in range(len(values)):
        out[i] = exp(values[i])
    return out


@numba.njit
def _bf16_all(values: np.ndarray) -> np.ndarray:
    out = np.empty(len(values), np.uint16)
    for i in range(len(values)):
        out[i] = to_bf16(values[i])
    return out


def test_exp_is_within_two_units_in_the_last_place() -> None:
    values = np.linspace(-86.9, 87.9, 200_001).astype(np.float32)
    exact = np.exp(values.astype(np.float64))
    error = np.abs(_exp_all(values).astype(np.float64) - exact) / np.spacing(exact.astype(np.float32)).astype(
        np.float64
    )
    assert error.max() <= 2


def test_exp_of_minus_infinity_is_exactly_zero() -> None:
    assert _exp_all(np.array([-np.inf, -88.0, -1e30], np.float32)).tolist() == [0, 0, 0]


def test_bf16_rounding_equals_torch_bit_for_bit() -> None:
    values = np.concatenate([np.random.default_rng(0).standard_normal(10_000), SPECIAL]).astype(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    found = _bf16_all(values)
    number = ~np.isnan(values)
    assert np.array_equal(found[number], expected[number])
    assert np.isnan((found[~number].astype(np.uint32) << 16).view(np.float32)).all()
