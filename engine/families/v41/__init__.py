"""DeepSeek-V4.1: a causal encoder-decoder schedule over shared compressed entries, Engram, and two kinds of MoE."""

from engine.families.v41.model import load

__all__ = ["load"]
