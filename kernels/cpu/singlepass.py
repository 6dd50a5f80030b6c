"""V4.1's mixing on the CPU: coefficients and collapse as two steps, as its sites use each other's; and plain norms."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel
from kernels.cpu.hyper import balance, collapse, mixing_products, soften
from kernels.cpu.numbers import sigmoid
from kernels.cpu.sums import inverse_rms
from kernels.cpu.tile import LANES
from kernels.operands import HyperSite

_CHUNK = 12  # rows per task: two register tiles


def hyper_mix(x: torch.Tensor, site: HyperSite) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As reference.csa2.hyper_mix."""
    rows, streams, _ = x.shape
    pre, post, comb = torch.empty(rows, streams), torch.empty(rows, streams), torch.empty(rows, streams, streams)
    _mix(
        x.view(rows, -1).numpy(), site.mix.array, site.base.numpy(), site.scale.numpy(), site.iterations,
        site.hyper_eps, site.norm_eps, pre.numpy(), post.numpy(), comb.numpy(),
    )  # fmt: skip
    return pre, post, comb


def hyper_collapse(x: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As reference.csa2.hyper_collapse."""
    out = torch.empty(x.shape[0], x.shape[2])
    _collapse(x.view(len(x), -1).numpy(), pre.numpy(), weight.numpy(), eps, out.numpy())
    return out


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As reference.csa2.norm."""
    out = torch.empty_like(x)
    _norm(x.numpy(), weight.numpy(), eps, out.numpy())
    return out


@parallel
def _mix(
    x: Array, mix: Array, base: Array, scale: Array, iterations: int, hyper_eps: float, norm_eps: float, pre: Array,
    post: Array, comb: Array,
) -> None:  # fmt: skip
    rows, flat = x.shape
    streams = pre.shape[1]
    for task in prange((rows + _CHUNK - 1) // _CHUNK):
        first = task * _CHUNK
        count = min(_CHUNK, rows - first)
        z = np.empty((_CHUNK, mix.shape[0] * LANES), np.float32)
        mixing_products(x, first, count, mix, z)
        for i in range(count):
            row = first + i
            unit = inverse_rms(x, row, 0, flat, norm_eps)
            for j in range(streams):
                pre[row, j] = sigmoid(z[i, j] * unit * scale[0] + base[j]) + np.float32(hyper_eps)
                at = streams + j
                post[row, j] = np.float32(2.0) * sigmoid(z[i, at] * unit * scale[1] + base[at])
            soften(z, i, 2 * streams, unit, scale[2], base, hyper_eps, comb[row])
            balance(comb[row], iterations, hyper_eps)


@parallel
def _collapse(x: Array, pre: Array, weight: Array, eps: float, out: Array) -> None:
    for row in prange(len(x)):
        collapse(x, row, pre[row], weight, eps, out)


@parallel
def _norm(x: Array, weight: Array, eps: float, out: Array) -> None:
    for row in prange(len(x)):
        unit = inverse_rms(x, row, 0, len(weight), eps)
        for c in range(len(weight)):
            out[row, c] = x[row, c] * unit * weight[c]
