"""DeepSeek-V2, V3 (and R1) and V3.2: latent attention, dense or sparse, over grouped experts."""

from engine.families.mla.model import load

__all__ = ["load"]
