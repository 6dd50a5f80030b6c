"""Rotary settings of V2 to V3.2: the table's, its amplitude, and what YaRN adds to the score scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from engine.families.fields import Fields, refusal, rope_of
from engine.families.yarn import Rope


@dataclass(frozen=True, slots=True)
class Rotary:
    """One table for queries and keys. `amplitude` multiplies cosine and sine, `score_factor` the attention scale."""

    rope: Rope
    amplitude: float
    score_factor: float


def rotary(config: dict[str, Any]) -> Rotary:
    """From `rope_scaling` (upstream) or `rope_parameters` (transformers). Raises CheckpointError naming the key."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key) or {}
    if not isinstance(given, dict):
        raise refusal(key, f"{given!r} is not an object", "restore config.json")
    theta = Fields({"rope_theta": given.get("rope_theta", config.get("rope_theta", 1e4))}).base("rope_theta")
    rope = rope_of(theta, given, key)
    if rope.yarn is None:
        return Rotary(rope, 1.0, 1.0)
    if given.get("attention_factor") is not None:
        raise refusal(key, "attention_factor is not supported", "give mscale and mscale_all_dim instead")
    fields, factor = Fields(given), rope.yarn.factor
    one, every = (fields.number(name) if given.get(name) else 0.0 for name in ("mscale", "mscale_all_dim"))
    amplitude = _gain(factor, one) / _gain(factor, every) if one and every else _gain(factor, 1.0)
    return Rotary(rope, amplitude, _gain(factor, every) ** 2)


def _gain(factor: float, mscale: float) -> float:
    """How much YaRN raises attention at a stretch of `factor` (arXiv 2309.00071)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
