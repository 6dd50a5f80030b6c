"""Rotary settings: a base, and what YaRN does to it. Knows config values; makes no table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN: long wavelengths are stretched by `factor`, short ones kept, with a ramp between the two betas."""

    factor: float
    original_tokens: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary table."""

    theta: float
    yarn: Yarn | None
