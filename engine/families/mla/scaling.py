"""Rotary settings of V2 to V3.2: the table's, its amplitude, and what YaRN adds to the score scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from engine.families.mla.fields import Fields, wrong
from engine.families.yarn import Rope, Yarn


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
        raise wrong(key, f"{given!r} is not an object", "restore config.json")
    theta = Fields({"rope_theta": given.get("rope_theta", config.get("rope_theta", 1e4))}).number("rope_theta", 1e4)
    if theta <= 1:
        raise wrong("rope_theta", f"{theta!r} is not a base", "restore config.json")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return Rotary(Rope(theta, None), 1.0, 1.0)
    if kind != "yarn":
        raise wrong(key, f"type {kind!r} is not supported", "these models use yarn or none")
    return _yarn(theta, given, key)


def _yarn(theta: float, given: dict[str, Any], key: str) -> Rotary:
    for needed in ("factor", "original_max_position_embeddings"):
        if given.get(needed) is None:
            raise wrong(key, f"{needed} is missing", "restore config.json")
    if given.get("attention_factor") is not None:
        raise wrong(key, "attention_factor is not supported", "give mscale and mscale_all_dim instead")
    fields = Fields(given)
    factor, original = fields.number("factor", 1.0), fields.count("original_max_position_embeddings")
    yarn = Yarn(factor, original, fields.number("beta_fast", 32.0), fields.number("beta_slow", 1.0))
    one, every = (fields.number(name, 1.0) if given.get(name) else 0.0 for name in ("mscale", "mscale_all_dim"))
    amplitude = _gain(factor, one) / _gain(factor, every) if one and every else _gain(factor, 1.0)
    return Rotary(Rope(theta, yarn), amplitude, _gain(factor, every) ** 2)


def _gain(factor: float, mscale: float) -> float:
    """How much YaRN raises attention at a stretch of `factor` (arXiv 2309.00071)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
