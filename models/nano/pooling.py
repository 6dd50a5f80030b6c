"""Rotary tables and the compressor that pools windows of tokens into entries. Knows packed documents, no attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.nano.attention import BLOCK
from models.nano.config import NanoConfig


def rms(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """x / RMS(x) over the last dimension, times `weight` in float32, cast once."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight.float()).to(x.dtype)


class Norm(nn.Module):
    """RMS normalisation with a weight, in float32, cast once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, eps: float) -> Tensor:
        return rms(x, eps, self.weight)


@dataclass(frozen=True, slots=True)
class Rope:
    """Cosines and sines [positions, pairs] float32; turns the trailing 2 * pairs channels in interleaved pairs."""

    cos: Tensor
    sin: Tensor

    def every(self, step: int) -> Rope:
        """The table of positions 0, step, 2 * step, ..."""
        return Rope(self.cos[::step], self.sin[::step])

    def at(self, places: Tensor) -> Rope:
        """The table of chosen positions, shaped as `places` plus [pairs]."""
        return Rope(self.cos[places], self.sin[places])

    def turn(self, x: Tensor, sign: float = 1.0) -> Tensor:
        """x [..., positions, channels]; sign -1 turns back."""
        width = 2 * self.cos.shape[-1]
        plain, turned = x[..., :-width], x[..., -width:].float()
        even, odd = turned[..., 0::2], turned[..., 1::2]
        cos, sin = self.cos, sign * self.sin
        pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
        return torch.cat((plain, pairs.to(x.dtype)), -1)


class Compressor(nn.Module):
    """Pools each window of `ratio` tokens into one entry; CSA's (ratio < window) also pools the window before."""

    def __init__(self, config: NanoConfig, ratio: int, width: int) -> None:
        super().__init__()
        self.ratio, self.width, self.eps = ratio, width, config.rms_norm_eps
        self.overlap = config.overlaps(ratio)
        outputs = 2 * width if self.overlap else width
        self.wkv = nn.Linear(config.hidden_size, outputs, bias=False)
        self.wgate = nn.Linear(config.hidden_size, outputs, bias=False)
        self.ape = nn.Parameter(torch.zeros(ratio, outputs))
        self.norm = Norm(width)

    def forward(self, x: Tensor, rope: Rope, documents: Tensor) -> Tensor:
        """x [batch, tokens, hidden] -> roped entries [batch, tokens / ratio, width]."""
        content = self.wkv(x).unflatten(1, (-1, self.ratio))
        gate = self.wgate(x).float().unflatten(1, (-1, self.ratio)) + self.ape
        if self.overlap:
            first = self._first_of_document(documents)
            content = torch.cat((_shifted(content[..., : self.width], 0.0), content[..., self.width :]), 2)
            earlier = _shifted(gate[..., : self.width], 0.0).masked_fill(first[:, :, None, None], float("-inf"))
            gate = torch.cat((earlier, gate[..., self.width :]), 2)
        pooled = (content.float() * gate.softmax(2)).sum(2).to(x.dtype)
        return rope.every(self.ratio).turn(self.norm(pooled, self.eps))

    def _first_of_document(self, documents: Tensor) -> Tensor:
        """[batch, windows] bool: windows with no window of their document before them."""
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        windows = BLOCK // self.ratio
        inside = torch.arange(windows, device=documents.device) == 0
        return (starts[:, :, None] & inside).flatten(1)


def _shifted(windows: Tensor, fill: float) -> Tensor:
    """Each window replaced by the one before it."""
    return torch.cat((torch.full_like(windows[:, :1], fill), windows[:, :-1]), 1)
