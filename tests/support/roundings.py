"""Number formats rounded by arithmetic on float64, written from their definitions. Imports nothing of the engine."""

from __future__ import annotations

import numpy as np

_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e4m3(x: np.ndarray) -> np.ndarray:
    """Nearest E4M3 value, ties to even: 3 bits behind the point, exponents from -6, at most 448."""
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-30))), -6)
    step = 2.0 ** (exponent - 3)
    return np.clip(np.round(x / step) * step, -448, 448)


def e2m1(x: np.ndarray) -> np.ndarray:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4 and 6 with a sign; ties go to the even code."""
    distance = np.abs(np.minimum(np.abs(x), 6.0)[..., None] - _E2M1)
    nearest = distance == distance.min(-1, keepdims=True)
    even = nearest & (np.arange(8) % 2 == 0)
    code = np.where(even.any(-1), even.argmax(-1), nearest.argmax(-1))
    return np.copysign(_E2M1[code], x)


def scaled_blocks(x: np.ndarray, block: int, form: str, power: bool) -> np.ndarray:
    """x rounded in blocks along its last axis; the scale maps the largest magnitude to the format's, or is the least
    power of two that does not let it overflow."""
    most, rounding = (448.0, e4m3) if form == "e4m3" else (6.0, e2m1)
    blocks = x.reshape(*x.shape[:-1], -1, block).astype(np.float64)
    scale = np.maximum(np.abs(blocks).max(-1, keepdims=True), 1e-4) / most
    scale = 2.0 ** np.ceil(np.log2(scale)) if power else scale.astype(np.float32).astype(np.float64)
    return (rounding((blocks / scale).astype(np.float32).astype(np.float64)) * scale).reshape(x.shape)


def mixed_by_hadamard(x: np.ndarray) -> np.ndarray:
    """x [..., width] times the matrix of signs (-1) ** (common one bits of row and column), over sqrt(width)."""
    width = x.shape[-1]
    signs = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(width)] for i in range(width)])
    return x.astype(np.float64) @ signs / np.sqrt(width)
