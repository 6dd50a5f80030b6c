"""Hyper-connections on the CPU: mixing coefficients with Sinkhorn, stream mixing and norm in one pass over the rows."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel, serial
from kernels.cpu.numbers import exp, fma, sigmoid
from kernels.cpu.sums import inverse_rms
from kernels.cpu.tile import LANES, panel_product
from kernels.operands import HyperHead, HyperSite

_CHUNK = 12  # rows per task: two register tiles


def hyper_pre(x: torch.Tensor, site: HyperSite) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As reference.hyper.hyper_pre."""
    rows, streams, hidden = x.shape
    out, post, comb = torch.empty(rows, hidden), torch.empty(rows, streams), torch.empty(rows, streams, streams)
    _pre(
        x.view(rows, -1).numpy(), site.mix.array, site.base.numpy(), site.scale.numpy(), site.norm.numpy(),
        streams, site.iterations, site.hyper_eps, site.norm_eps, out.numpy(), post.numpy(), comb.numpy(),
    )  # fmt: skip
    return out, post, comb


def hyper_post(x: torch.Tensor, block: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """As reference.hyper.hyper_post."""
    out = torch.empty_like(x)
    _post(x.numpy(), block.numpy(), post.numpy(), comb.numpy(), out.numpy())
    return out


def hyper_head(x: torch.Tensor, head: HyperHead) -> torch.Tensor:
    """As reference.hyper.hyper_head."""
    rows, streams, hidden = x.shape
    out = torch.empty(rows, hidden)
    _head(
        x.view(rows, -1).numpy(), head.mix.array, head.base.numpy(), head.scale.numpy(), head.norm.numpy(),
        streams, head.hyper_eps, head.norm_eps, out.numpy(),
    )  # fmt: skip
    return out


@serial
def mixing_products(x: Array, first: int, count: int, mix: Array, out: Array) -> None:
    flat = x.shape[1]
    for p in range(mix.shape[0]):
        panel_product(
            x, first * flat, flat, 1, count, mix, p * flat * LANES, LANES, flat, out, p * LANES, mix.shape[0] * LANES
        )


@serial
def balance(comb: Array, iterations: int, eps: float) -> None:
    """Sinkhorn in place on comb [m, m]: columns first, then rows and columns in turn; ends on columns."""
    streams = comb.shape[0]
    for turn in range(2 * iterations - 1):
        for i in range(streams):
            total = np.float32(eps)
            for j in range(streams):
                total += comb[j, i] if turn % 2 == 0 else comb[i, j]
            inverse = np.float32(1.0) / total
            for j in range(streams):
                if turn % 2 == 0:
                    comb[j, i] *= inverse
                else:
                    comb[i, j] *= inverse


@serial
def soften(z: Array, row: int, first: int, unit: float, scale: float, base: Array, eps: float, comb: Array) -> None:
    """comb [m, m] = softmax over each row of the scaled logits, plus eps."""
    streams = comb.shape[0]
    for i in range(streams):
        highest = np.float32(-np.inf)
        for j in range(streams):
            at = first + i * streams + j
            comb[i, j] = z[row, at] * unit * scale + base[at]
            highest = max(highest, comb[i, j])
        total = np.float32(0.0)
        for j in range(streams):
            comb[i, j] = exp(comb[i, j] - highest)
            total += comb[i, j]
        for j in range(streams):
            comb[i, j] = comb[i, j] / total + np.float32(eps)


@serial
def collapse(x: Array, row: int, weights: Array, norm: Array, eps: float, out: Array) -> None:
    """out[row] = rmsnorm(sum_i weights[i] * stream i of x[row]) * norm."""
    hidden = out.shape[1]
    for d in range(hidden):
        out[row, d] = weights[0] * x[row, d]
    for i in range(1, weights.shape[0]):
        for d in range(hidden):
            out[row, d] = fma(weights[i], x[row, i * hidden + d], out[row, d])
    unit = inverse_rms(out, row, 0, hidden, eps)
    for d in range(hidden):
        out[row, d] = out[row, d] * unit * norm[d]


@parallel
def _pre(
    x: Array, mix: Array, base: Array, scale: Array, norm: Array,
    streams: int, iterations: int, hyper_eps: float, norm_eps: float, out: Array, post: Array, comb: Array,
) -> None:  # fmt: skip
    rows, flat = x.shape
    for task in prange((rows + _CHUNK - 1) // _CHUNK):
        first = task * _CHUNK
        count = min(_CHUNK, rows - first)
        z = np.empty((_CHUNK, mix.shape[0] * LANES), np.float32)
        weights = np.empty(streams, np.float32)
        mixing_products(x, first, count, mix, z)
        for i in range(count):
            row = first + i
            unit = inverse_rms(x, row, 0, flat, norm_eps)
            for j in range(streams):
                weights[j] = sigmoid(z[i, j] * unit * scale[0] + base[j]) + np.float32(hyper_eps)
                at = streams + j
                post[row, j] = np.float32(2.0) * sigmoid(z[i, at] * unit * scale[1] + base[at])
            soften(z, i, 2 * streams, unit, scale[2], base, hyper_eps, comb[row])
            balance(comb[row], iterations, hyper_eps)
            collapse(x, row, weights, norm, norm_eps, out)


@parallel
def _post(x: Array, block: Array, post: Array, comb: Array, out: Array) -> None:
    rows, streams, hidden = x.shape
    for row in prange(rows):
        for k in range(streams):
            for d in range(hidden):
                out[row, k, d] = post[row, k] * block[row, d]
            for j in range(streams):
                for d in range(hidden):
                    out[row, k, d] = fma(comb[row, j, k], x[row, j, d], out[row, k, d])


@parallel
def _head(
    x: Array, mix: Array, base: Array, scale: Array, norm: Array, streams: int, hyper_eps: float, norm_eps: float,
    out: Array,
) -> None:  # fmt: skip
    rows, flat = x.shape
    for task in prange((rows + _CHUNK - 1) // _CHUNK):
        first = task * _CHUNK
        count = min(_CHUNK, rows - first)
        z = np.empty((_CHUNK, mix.shape[0] * LANES), np.float32)
        weights = np.empty(streams, np.float32)
        mixing_products(x, first, count, mix, z)
        for i in range(count):
            unit = inverse_rms(x, first + i, 0, flat, norm_eps)
            for j in range(streams):
                weights[j] = sigmoid(z[i, j] * unit * scale[0] + base[j]) + np.float32(hyper_eps)
            collapse(x, first + i, weights, norm, norm_eps, out)
