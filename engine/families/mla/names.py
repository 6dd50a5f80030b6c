"""Tensor names of V2, V3 and V3.2: upstream and transformers agree but for the name of a scale. Knows names only."""

from __future__ import annotations


def upstream(stored: str) -> str:
    """The name the reader asks for: `model.` is dropped, and a block scale is called as in V4."""
    name = stored.removeprefix("model.")
    return name.removesuffix("weight_scale_inv") + "scale" if name.endswith(".weight_scale_inv") else name
