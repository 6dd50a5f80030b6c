"""Rotary tables, grown to the positions in use. Knows angles; rotates nothing."""

from __future__ import annotations

import math

import torch

from engine.families.yarn import Rope
from kernels.operands import CPU, RopeTable

_FIRST_POSITIONS = 1024


def inverse_frequencies(rope: Rope, width: int) -> torch.Tensor:
    """Angle per position of each pair, fp32 [width / 2] (YaRN, arXiv 2309.00071, without its amplitude factor)."""
    plain = 1.0 / rope.theta ** (torch.arange(0, width, 2).float() / width)
    if rope.yarn is None:
        return plain
    yarn = rope.yarn

    def pair_of(turns: float) -> float:
        """The (fractional) pair that makes `turns` turns within the original context."""
        return width * math.log(yarn.original_tokens / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), width - 1)
    ramp = ((torch.arange(width // 2).float() - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


class GrowingRope:
    """A table that doubles when a position beyond its end is needed; its owner is the model that reads it."""

    def __init__(self, rope: Rope, width: int, amplitude: float = 1.0, device: torch.device = CPU) -> None:
        """`amplitude` multiplies cosine and sine."""
        self._frequencies, self._amplitude, self._device = inverse_frequencies(rope, width), amplitude, device
        self._table = self._make(_FIRST_POSITIONS)

    def upto(self, positions: int) -> RopeTable:
        """A table of at least `positions` positions."""
        have = len(self._table.cos)
        if have < positions:
            self._table = self._make(max(positions, 2 * have))
        return self._table

    def _make(self, positions: int) -> RopeTable:
        angles = torch.arange(positions).float()[:, None] * self._frequencies  # on the host: the same bits everywhere
        tables = (angles.cos() * self._amplitude, angles.sin() * self._amplitude)
        return RopeTable(*(table.to(self._device) for table in tables))
