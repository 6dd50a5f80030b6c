"""The vision part of tiny random V4.1 checkpoints: a section of config.json and its tensors. Writes no file."""

from __future__ import annotations

from typing import Any

import torch

from engine.families.v41.vision.config import VisionConfig

TINY_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": 14,
    "downsample_ratio": 3,
    "rope_theta": 10000.0,
    "max_image_tokens": 40,
    "min_pixels": 7056,
    "max_wh_ratio": None,
}


def random_tensors(config: VisionConfig, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of the vision part under its upstream name, fp32; biases and markers are drawn as well."""
    draw = _Draw(torch.Generator().manual_seed(seed))
    c, merged = config, config.hidden * config.limits.merge**2
    draw.linear("vision.patch_embed.proj", c.hidden, c.patch_numbers)
    for index in range(c.layers):
        prefix = f"vision.blocks.{index}"
        draw.norm(f"{prefix}.norm1", c.hidden)
        draw.linear(f"{prefix}.attn.wqkv", 3 * c.hidden, c.hidden)
        draw.linear(f"{prefix}.attn.wo", c.hidden, c.hidden)
        draw.norm(f"{prefix}.norm2", c.hidden)
        draw.linear(f"{prefix}.mlp.w1", 2 * c.inner, c.hidden, biased=False)
        draw.linear(f"{prefix}.mlp.w2", c.hidden, c.inner, biased=False)
    draw.norm("vision.norm", c.hidden)
    draw.linear("aligner.w1", c.embedding, merged)
    draw.linear("aligner.w2", c.embedding, c.embedding)
    for role in ("start", "newline", "end"):
        draw.vector(f"image_{role}", c.embedding)
    return draw.tensors


class _Draw:
    """Draws tensors in a fixed order from one generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self.tensors: dict[str, torch.Tensor] = {}

    def linear(self, name: str, outputs: int, inputs: int, biased: bool = True) -> None:
        matrix = torch.randn(outputs, inputs, generator=self._generator)
        self.tensors[f"{name}.weight"] = matrix * inputs**-0.5  # keeps the scale from layer to layer
        if biased:
            self.vector(f"{name}.bias", outputs)

    def norm(self, name: str, width: int) -> None:
        self.tensors[f"{name}.weight"] = torch.rand(width, generator=self._generator) + 0.5

    def vector(self, name: str, width: int) -> None:
        self.tensors[name] = torch.randn(width, generator=self._generator) * 0.2
