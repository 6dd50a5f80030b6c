"""Counter-based random numbers: draw i of a seed, on every machine the same. Knows no batches and keeps no state.

Philox-4x32-10 as published by Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counters: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Random 32-bit words `[rows, 4]` from counters `[rows, 4]` and keys `[rows, 2]`, 32 bits in each uint64."""
    c0, c1, c2, c3 = (counters[:, lane] for lane in range(4))
    k0, k1 = keys[:, 0], keys[:, 1]
    for _ in range(_ROUNDS):
        left, right = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (right >> _HALF) ^ c1 ^ k0, right & _LOW, (left >> _HALF) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1)


def uniforms(seeds: list[int], draws: list[int]) -> NDArray[np.float64]:
    """One number in [0, 1) per (seed, draw) pair, with 53 random bits: `[rows]`."""
    seed, draw = np.array(seeds, dtype=np.uint64), np.array(draws, dtype=np.uint64)
    zero = np.zeros_like(draw)
    words = philox(
        np.stack((draw & _LOW, draw >> _HALF, zero, zero), axis=1), np.stack((seed & _LOW, seed >> _HALF), axis=1)
    )
    bits = (words[:, 0] << _HALF | words[:, 1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
