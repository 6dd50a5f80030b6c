"""Root-mean-square norm and rotary embedding in torch. Knows no cache."""

from __future__ import annotations

import torch


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x**2) + eps) over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The root-mean-square norm of x [rows, width], times weight [width]."""
    return unit_rms(x, eps) * weight


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate the trailing interleaved pairs of x [..., width] by angles [..., pairs]; negate `sine` to undo it."""
    pairs = cosine.shape[-1]
    still, turning = x[..., : -2 * pairs], x[..., -2 * pairs :]
    even, odd = turning[..., 0::2], turning[..., 1::2]
    turned = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1)
    return torch.cat([still, turned.flatten(-2)], -1)
