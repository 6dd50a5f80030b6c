"""Hyper-connections on a GPU: one product for a site's coefficients, one program a row for all that follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import triton
import triton.language as tl
from torch import Tensor

from kernels.operands import HyperHead, HyperSite
from kernels.triton.engine.linear import FEW_ROWS, few_rows
from kernels.triton.engine.precise import precise

Coefficients: TypeAlias = Callable[[Tensor, HyperSite | HyperHead], Tensor]
_CHANNELS = 1024  # that one program of `hyper_post` writes of each stream


def hyper_pre(x: Tensor, site: HyperSite, coefficients: Coefficients | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """As reference.hyper.hyper_pre; `coefficients` instead of this module's product."""
    rows, m, hidden = x.shape
    out, post, comb = x.new_empty(rows, hidden), x.new_empty(rows, m), x.new_empty(rows, m, m)
    _site[(rows,)](
        (coefficients or _coefficients)(x, site), site.scale, site.base, x, site.norm, out, post, comb, site.hyper_eps,
        site.norm_eps, M=m, LANES=triton.next_power_of_2(m), HIDDEN=hidden, TURNS=site.iterations,
        WIDE=triton.next_power_of_2(hidden), COLLAPSE=True, num_warps=8,
    )  # fmt: skip
    return out, post, comb


def hyper_mix(x: Tensor, site: HyperSite) -> tuple[Tensor, Tensor, Tensor]:
    """As reference.csa2.hyper_mix."""
    rows, m, hidden = x.shape
    pre, post, comb = x.new_empty(rows, m), x.new_empty(rows, m), x.new_empty(rows, m, m)
    _site[(rows,)](
        _coefficients(x, site), site.scale, site.base, x, site.norm, pre, post, comb, site.hyper_eps, site.norm_eps,
        M=m, LANES=triton.next_power_of_2(m), HIDDEN=hidden, TURNS=site.iterations, WIDE=16,
        COLLAPSE=False, num_warps=1,
    )  # fmt: skip
    return pre, post, comb


def hyper_post(x: Tensor, block: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """As reference.hyper.hyper_post."""
    (rows, m, hidden), out = x.shape, x.new_empty(x.shape)
    wide = min(triton.next_power_of_2(hidden), _CHANNELS)
    _post[(rows, triton.cdiv(hidden, wide))](
        x, block, post, comb, out, M=m, HIDDEN=hidden, WIDE=wide, num_warps=4
    )  # fmt: skip
    return out


def hyper_head(x: Tensor, head: HyperHead, coefficients: Coefficients | None = None) -> Tensor:
    """As reference.hyper.hyper_head; `coefficients` instead of this module's product."""
    rows, m, hidden = x.shape
    out = x.new_empty(rows, hidden)
    _head[(rows,)](
        (coefficients or _coefficients)(x, head), head.scale, head.base, x, head.norm, out, head.hyper_eps,
        head.norm_eps, M=m, LANES=triton.next_power_of_2(m), HIDDEN=hidden, WIDE=triton.next_power_of_2(hidden),
        GIVEN=False, num_warps=8,
    )  # fmt: skip
    return out


def hyper_collapse(x: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As reference.csa2.hyper_collapse."""
    rows, m, hidden = x.shape
    out = x.new_empty(rows, hidden)
    _head[(rows,)](
        pre, pre, pre, x, weight, out, 0.0, eps, M=m, LANES=triton.next_power_of_2(m), HIDDEN=hidden,
        WIDE=triton.next_power_of_2(hidden), GIVEN=True, num_warps=8,
    )  # fmt: skip
    return out


def _coefficients(x: Tensor, site: HyperSite | HyperHead) -> Tensor:
    """The mixing product of the normed streams."""
    flat = x.flatten(1)
    if len(x) <= FEW_ROWS:
        return few_rows(flat, site.mix, eps=site.norm_eps, unit=True)
    return precise(flat, site.mix, site.norm_eps)


@triton.jit
def _collapsed(x, row, weights, stream, norm, eps, M: tl.constexpr, HIDDEN: tl.constexpr, WIDE: tl.constexpr):
    """The normed sum of the streams by `weights`, which stand in the lanes `stream`."""
    channel = tl.arange(0, WIDE)
    total = tl.zeros((WIDE,), tl.float32)
    for one in tl.static_range(M):
        value = tl.load(x + (row * M + one) * HIDDEN + channel, mask=channel < HIDDEN, other=0.0)
        total += value * tl.sum(tl.where(stream == one, weights, 0.0), 0)
    total *= tl.rsqrt(tl.sum(total * total, 0) / HIDDEN + eps)
    return total * tl.load(norm + channel, mask=channel < HIDDEN, other=0.0)


@triton.jit
def _sigmoid(value):
    return 1 / (1 + tl.exp(-value))


@triton.jit
def _site(
    z, scale, base, x, norm, out, post, comb, hyper_eps, norm_eps, M: tl.constexpr, LANES: tl.constexpr,
    HIDDEN: tl.constexpr, TURNS: tl.constexpr, WIDE: tl.constexpr, COLLAPSE: tl.constexpr,
):  # fmt: skip
    """A site's three coefficients of one row, `comb` by Sinkhorn, and with COLLAPSE the block's input."""
    row = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, LANES)
    inside = stream < M
    square = inside[:, None] & inside[None, :]
    source = z + row * (2 + M) * M
    first, second, third = tl.load(scale), tl.load(scale + 1), tl.load(scale + 2)
    before = _sigmoid(
        tl.load(source + stream, mask=inside, other=0.0) * first + tl.load(base + stream, mask=inside, other=0.0)
    )
    before += hyper_eps
    after = tl.load(source + M + stream, mask=inside, other=0.0) * second
    after = 2 * _sigmoid(after + tl.load(base + M + stream, mask=inside, other=0.0))
    tl.store(post + row * M + stream, after, mask=inside)
    place = 2 * M + stream[:, None] * M + stream[None, :]
    mixing = tl.load(source + place, mask=square, other=0.0) * third + tl.load(base + place, mask=square, other=0.0)
    mixing = tl.where(square, mixing, -float("inf"))
    mixing = tl.where(square, tl.exp(mixing - tl.max(mixing, 1)[:, None]), 0.0)
    mixing = tl.where(square, mixing / tl.sum(mixing, 1)[:, None] + hyper_eps, 0.0)
    mixing /= tl.sum(mixing, 0)[None, :] + hyper_eps
    for _ in range(TURNS - 1):
        mixing /= tl.sum(mixing, 1)[:, None] + hyper_eps
        mixing /= tl.sum(mixing, 0)[None, :] + hyper_eps
    tl.store(comb + row * M * M + stream[:, None] * M + stream[None, :], mixing, mask=square)
    if COLLAPSE:
        channel = tl.arange(0, WIDE)
        result = _collapsed(x, row, before, stream, norm, norm_eps, M, HIDDEN, WIDE)
        tl.store(out + row * HIDDEN + channel, result, mask=channel < HIDDEN)
    else:
        tl.store(out + row * M + stream, before, mask=inside)


@triton.jit
def _head(
    z, scale, base, x, norm, out, hyper_eps, norm_eps, M: tl.constexpr, LANES: tl.constexpr, HIDDEN: tl.constexpr,
    WIDE: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    row, stream, channel = tl.program_id(0).to(tl.int64), tl.arange(0, LANES), tl.arange(0, WIDE)
    inside = stream < M
    weights = tl.load(z + row * M + stream, mask=inside, other=0.0)
    if not GIVEN:
        weights = _sigmoid(weights * tl.load(scale) + tl.load(base + stream, mask=inside, other=0.0)) + hyper_eps
    result = _collapsed(x, row, weights, stream, norm, norm_eps, M, HIDDEN, WIDE)
    tl.store(out + row * HIDDEN + channel, result, mask=channel < HIDDEN)


@triton.jit
def _post(x, block, post, comb, out, M: tl.constexpr, HIDDEN: tl.constexpr, WIDE: tl.constexpr):
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = channel < HIDDEN
    given = tl.load(block + row * HIDDEN + channel, mask=inside, other=0.0)
    for k in tl.static_range(M):
        total = given * tl.load(post + row * M + k)
        for j in tl.static_range(M):
            value = tl.load(x + (row * M + j) * HIDDEN + channel, mask=inside, other=0.0)
            total += value * tl.load(comb + (row * M + j) * M + k)
        tl.store(out + (row * M + k) * HIDDEN + channel, total, mask=inside)
