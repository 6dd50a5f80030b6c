"""DeepSeek-V4: sliding, compressed sparse and heavily compressed attention, hyper-connections, hashed and learned MoE."""

from engine.families.v4.model import load

__all__ = ["load"]
