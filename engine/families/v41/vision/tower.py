"""The vision tower and its aligner: patches of one image to embeddings of its image tokens. Owns nothing.

Residuals, norms, rotations and biases are fp32 whatever the type of the matrices. Every image is computed alone, so
no other image can change its bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.families.v41.vision.config import VisionConfig
from engine.families.v41.vision.sizing import Plan
from engine.families.v41.vision.weights import Block, Linear, VisionWeights

_NORM_EPS = 1e-6
Turns = tuple[torch.Tensor, torch.Tensor]  # cosines and sines [patches, 1, head_dim / 2]


def tower(patches: torch.Tensor, plan: Plan, config: VisionConfig, weights: VisionWeights) -> torch.Tensor:
    """Patch states fp32 [patches, hidden] of one image from its patches [patches, 3 * patch * patch]."""
    turns = _turns(plan, config)
    x = _linear(patches.to(torch.float32), weights.patch)
    for block in weights.blocks:
        x = x + _attention(_norm(x, block.attention_norm), block, turns, config)
        gate, up = _linear(_norm(x, block.mlp_norm), block.gate_up).chunk(2, -1)
        x = x + _linear(F.silu(gate) * up, block.down)
    return _norm(x, weights.norm)


def align(states: torch.Tensor, plan: Plan, config: VisionConfig, weights: VisionWeights) -> torch.Tensor:
    """Image-token embeddings fp32 [rows * columns, embedding]: squares of patches side by side, zeros past the edge."""
    merge = config.limits.merge
    grid = states.view(plan.patch_rows, plan.patch_columns, config.hidden)
    below, right = plan.rows * merge - plan.patch_rows, plan.columns * merge - plan.patch_columns
    squares = F.pad(grid, (0, 0, 0, right, 0, below)).view(plan.rows, merge, plan.columns, merge, config.hidden)
    merged = squares.permute(0, 2, 4, 1, 3).reshape(plan.rows * plan.columns, -1)  # channel, then row, then column
    return _linear(F.gelu(_linear(merged, weights.merge)), weights.project)


def _attention(x: torch.Tensor, block: Block, turns: Turns, config: VisionConfig) -> torch.Tensor:
    """Every patch sees every patch of the image."""
    heads = _linear(x, block.query_key_value).view(len(x), 3, config.heads, config.head_dim)
    queries, keys, values = heads.unbind(1)
    queries, keys = _rotated(queries, turns), _rotated(keys, turns)
    by_head = [part.transpose(0, 1)[None] for part in (queries, keys, values)]
    mixed = F.scaled_dot_product_attention(by_head[0], by_head[1], by_head[2])
    return _linear(mixed[0].transpose(0, 1).reshape(len(x), config.hidden), block.output)


def _turns(plan: Plan, config: VisionConfig) -> Turns:
    """The first half of the angles counts rows, the second columns."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-torch.arange(0, half, 2, dtype=torch.float32) / half)
    row = torch.arange(plan.patch_rows, dtype=torch.float32).repeat_interleave(plan.patch_columns)
    column = torch.arange(plan.patch_columns, dtype=torch.float32).repeat(plan.patch_rows)
    angles = torch.cat([row[:, None] * frequencies, column[:, None] * frequencies], 1)[:, None]
    return angles.cos(), angles.sin()


def _rotated(x: torch.Tensor, turns: Turns) -> torch.Tensor:
    """Channel i turns with channel i + head_dim / 2."""
    (cosine, sine), (first, second) = turns, x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _NORM_EPS) * weight


def _linear(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    product = F.linear(x.to(linear.weight.dtype), linear.weight).to(torch.float32)
    return product if linear.bias is None else product + linear.bias
