"""Engram's hash: which table rows the last few tokens select. Knows token classes, no tables and no sequences."""

from __future__ import annotations

import math

import numpy as np

from engine.families.v41.config import EngramConfig

NOTHING = -1  # class of a position before the sequence, and of one that n-grams must not reach across
_SEED_PER_LAYER = 10007


class EngramHash:
    """Primes, offsets and multipliers of every Engram layer, fixed by the config alone.

    `primes` and `offsets` are int64 [layers, columns], columns ordered by n-gram length, then head; `multipliers` is
    int64 [layers, longest].
    """

    def __init__(self, config: EngramConfig, pad_class: int) -> None:
        self.heads, self.pad = config.heads, pad_class
        self.primes = _primes(config)
        self.offsets = np.cumsum(self.primes, 1) - self.primes
        self.table_rows = tuple(int(total) for total in self.primes.sum(1))
        # Small enough that class times multiplier stays below 2**63.
        bound = max(1, np.iinfo(np.int64).max // config.classes // 2)
        draws = [
            np.random.default_rng(_SEED_PER_LAYER * layer).integers(0, bound, config.longest) for layer in config.layers
        ]
        self.multipliers = np.stack(draws) * 2 + 1

    def rows(self, recent: np.ndarray) -> np.ndarray:
        """Table rows int64 [tokens, layers, columns]; `recent` int64 [tokens, longest] is each token's class, then
        those of the tokens before it, nearest first. From the first NOTHING on, all count as padding."""
        broken = np.logical_or.accumulate(recent == NOTHING, 1)
        classes = np.where(broken, self.pad, recent)
        products = classes[:, None, :] * self.multipliers
        mixed = np.bitwise_xor.accumulate(products, 2)[..., 1:]
        return np.repeat(mixed, self.heads, 2) % self.primes + self.offsets


def _primes(config: EngramConfig) -> np.ndarray:
    """The next unused primes, starting over for every layer and n-gram length; no two of them are equal."""
    used: set[int] = set()
    found = []
    for _ in range(len(config.layers) * (config.longest - 1)):
        candidate = config.first_prime_after
        for _ in range(config.heads):
            candidate += 1
            while candidate in used or not _is_prime(candidate):
                candidate += 1
            used.add(candidate)
            found.append(candidate)
    return np.array(found, np.int64).reshape(len(config.layers), -1)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
