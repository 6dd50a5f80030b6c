"""Hyper-connections in torch: how the residual streams mix into a block and back (arch: mHC with Sinkhorn)."""

from __future__ import annotations

import torch

from kernels.operands import HyperHead, HyperSite
from kernels.reference.linear import linear
from kernels.reference.norm import unit_rms


def hyper_pre(x: torch.Tensor, site: HyperSite) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Streams x [rows, m, hidden] -> normed block input [rows, hidden], post [rows, m], comb [rows, m, m], fp32."""
    m = site.streams
    z = linear(unit_rms(x.flatten(1), site.norm_eps), site.mix)
    scale, base = site.scale, site.base
    weights = torch.sigmoid(z[:, :m] * scale[0] + base[:m]) + site.hyper_eps
    post = 2 * torch.sigmoid(z[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    comb = (z[:, 2 * m :] * scale[2] + base[2 * m :]).view(-1, m, m).softmax(-1) + site.hyper_eps
    comb = sinkhorn(comb, site.iterations, site.hyper_eps)
    return collapse(x, weights, site.norm, site.norm_eps), post, comb


def hyper_post(x: torch.Tensor, block: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """New streams: stream k = post[k] * block [rows, hidden] + sum_j comb[j, k] * stream j."""
    return post[..., None] * block[:, None] + torch.einsum("rjk,rjd->rkd", comb, x)


def hyper_head(x: torch.Tensor, head: HyperHead) -> torch.Tensor:
    """Streams [rows, m, hidden] -> the final normed hidden state [rows, hidden]."""
    z = linear(unit_rms(x.flatten(1), head.norm_eps), head.mix)
    weights = torch.sigmoid(z * head.scale + head.base) + head.hyper_eps
    return collapse(x, weights, head.norm, head.norm_eps)


def sinkhorn(comb: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def collapse(x: torch.Tensor, weights: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    return unit_rms((weights[..., None] * x).sum(1), eps) * norm
