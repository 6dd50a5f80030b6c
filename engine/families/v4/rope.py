"""V4's rotary tables are everybody's (see engine.families.rotary)."""

from engine.families.rotary import GrowingRope, inverse_frequencies

__all__ = ["GrowingRope", "inverse_frequencies"]
