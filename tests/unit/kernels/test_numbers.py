"""Scalar mathematics of the CPU kernels against torch and float64."""

from __future__ import annotations

import numba
import numpy as np
import torch

from kernels.cpu.numbers import exp, narrow_into, to_bf16, widen

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


@numba.njit
def _copy_into(target: np.ndarray, source: np.ndarray) -> None:
    for i in range(source.shape[1]):
        narrow_into(target, 0, i, widen(source[0, i]))


def test_elements_mean_the_same_inside_and_outside_of_kernels() -> None:
    values = np.random.default_rng(1).standard_normal((1, 500)).astype(np.float32)
    for target_dtype in (np.float32, np.uint16):
        for source in (values, _bf16_all(values[0])[None]):
            compiled, plain = np.zeros(source.shape, target_dtype), np.zeros(source.shape, target_dtype)
            _copy_into(compiled, source)
            _copy_into.py_func(plain, source)
            assert np.array_equal(compiled, plain)
            assert np.abs(widen(compiled[0, 3]) - values[0, 3]) < 0.01 * abs(values[0, 3])


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
