"""Float64 pieces that the dense references share, written from published formulas. Imports nothing of the engine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]


def read(folder: Path) -> tuple[dict[str, Any], Tensors]:
    """config.json and every tensor as float64 (integers stay integers)."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "model.safetensors")
    return config, {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}


def unit(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x over its root mean square."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def turn(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Interleaved pairs of x [..., 2 * pairs] as complex numbers, times exp(i * angles)."""
    pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.exp(1j * angles)).flatten(-2)


def frequencies(width: int, base: float, yarn: dict[str, Any] | None) -> torch.Tensor:
    """Angle per position of each pair: plain, or stretched by YaRN's ramp."""
    plain = torch.tensor([base ** (-2 * j / width) for j in range(width // 2)], dtype=torch.float64)
    if yarn is None:
        return plain
    length = yarn["original_max_position_embeddings"]

    def pair(turns: float) -> float:
        return width * math.log(length / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = max(math.floor(pair(yarn["beta_fast"])), 0), min(math.ceil(pair(yarn["beta_slow"])), width - 1)
    ramp = ((torch.arange(width // 2).double() - low) / ((high - low) or 0.001)).clamp(0, 1)
    return plain / yarn["factor"] * ramp + plain * (1 - ramp)


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, limit: float) -> torch.Tensor:
    """SwiGLU; the gate is cut above `limit`, the other factor on both sides."""
    opened, other = x @ gate.T, x @ up.T
    return (torch.nn.functional.silu(opened.clamp(max=limit)) * other.clamp(-limit, limit)) @ down.T
