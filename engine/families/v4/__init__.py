"""DeepSeek-V4: window, compressed sparse and heavily compressed attention, hyper-connections, two kinds of MoE."""

from engine.families.v4.model import load

__all__ = ["load"]
