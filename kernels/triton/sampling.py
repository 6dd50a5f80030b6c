"""Choice of tokens on a GPU, one program a row; definition: kernels/reference/sampling.py.

Thresholds are found by halving among the logits' bits: a row is read again for each bit that matters, some twenty times
for top-k and as often for top-p. Weights are integers, so that neither the order of sums nor the batch changes a token.
One launch, no workspace: it captures into a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.rms_norm import check_rows
from kernels.reference.sampling import ONE, SamplingRows, check_sampling

_ONE = tl.constexpr(2.0**ONE)
_FAINT = tl.constexpr(30.0)  # exp(-30) * 2**40 is below 1: lighter tokens weigh nothing


def sample(logits: Tensor, rows: SamplingRows, tokens: Tensor, block: int = 8192, warps: int = 32) -> None:
    """Fill tokens int32 [rows]; operands as in the definition. Raises KernelError for operands it does not take."""
    check_sampling(logits, rows)
    check_rows("tokens", tokens, (len(logits),), torch.int32)
    if len(logits):
        _sample[(len(logits),)](
            logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds, rows.draws, tokens,
            logits.shape[1], logits.stride(0), BLOCK=block, num_warps=warps,
        )  # fmt: skip


@triton.jit
def _key(x):
    """An int32 in the order of fp32 numbers, both zeros equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight(x, peak, unit):
    return (tl.exp((x - peak) * unit) * _ONE).to(tl.int64)


@triton.jit
def _above(source, columns, peak, unit, least, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens have at least the key `least`, and what they weigh if that is asked for."""
    lane = tl.arange(0, BLOCK)
    count, mass = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int64)
    for start in range(0, columns, BLOCK):
        x = tl.load(source + start + lane, mask=start + lane < columns, other=float("-inf"))
        inside = (_key(x) >= least) & (start + lane < columns)
        count += inside.to(tl.int32)
        if WEIGHED:
            mass += tl.where(inside, _weight(x, peak, unit), 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _threshold(source, columns, peak, unit, least, need, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key of which `need` tokens, or so much weight, are not below; `least` where that is not reached."""
    low, high = least.to(tl.int64), _key(peak).to(tl.int64) + 1
    below, above = columns + 0, columns * 0  # tokens from `low` on, at most, and from `high` on
    while (high - low > 1) & (below - above > 1):
        middle = low + (high - low) // 2
        count, mass = _above(source, columns, peak, unit, middle.to(tl.int32), not COUNTED, BLOCK)
        reached = (count.to(tl.int64) if COUNTED else mass) >= need
        low, high = tl.where(reached, middle, low), tl.where(reached, high, middle)
        below, above = tl.where(reached, count, below), tl.where(reached, above, count)
    return low.to(tl.int32)


@triton.jit
def _sample(
    logits, temperature, top_k, top_p, min_p, seeds, draws, tokens, columns, row_stride, BLOCK: tl.constexpr
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    source, lane = logits + row * row_stride, tl.arange(0, BLOCK)
    best, place = tl.full((BLOCK,), float("-inf"), tl.float32), tl.full((BLOCK,), 0, tl.int32)
    good = tl.full((BLOCK,), 1, tl.int32)
    for start in range(0, columns, BLOCK):
        x = tl.load(source + start + lane, mask=start + lane < columns, other=float("-inf"))
        good = good & (x < float("inf")).to(tl.int32)
        place = tl.where(x > best, start + lane, place)
        best = tl.where(x > best, x, best)
    peak = tl.max(best, 0)
    token = tl.min(tl.where(best == peak, place, columns), 0)
    heat = tl.load(temperature + row)
    if (tl.min(good, 0) == 0) | (peak == float("-inf")):
        token = columns * 0 - 1
    elif heat > 0:
        unit = 1.0 / heat
        least = _key(peak - _FAINT * heat)
        count = tl.load(top_k + row)
        if (count > 0) & (count < columns):
            least = _threshold(source, columns, peak, unit, least, count.to(tl.int64), True, BLOCK)
        share = tl.load(top_p + row)
        if share < 1.0:
            _, mass = _above(source, columns, peak, unit, least, True, BLOCK)
            part = (share.to(tl.float64) * 4294967296.0).to(tl.uint64) << 32
            need = tl.maximum(tl.umulhi(part, mass.to(tl.uint64)).to(tl.int64), 1)
            least = _threshold(source, columns, peak, unit, least, need, False, BLOCK)
        token = _draw(source, columns, peak, unit, least, tl.load(min_p + row) * _ONE, seeds, draws, row, BLOCK)
    tl.store(tokens + row, token)


@triton.jit
def _draw(source, columns, peak, unit, least, light, seeds, draws, row, BLOCK: tl.constexpr):
    """The token at the point of this draw."""
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, columns, BLOCK):
        x = tl.load(source + start + lane, mask=start + lane < columns, other=float("-inf"))
        weight = _weight(x, peak, unit)
        mass += tl.where((_key(x) >= least) & (weight.to(tl.float32) >= light), weight, 0)
    draw = tl.load(draws + row).to(tl.uint64)
    none = (draw * 0).to(tl.uint32)
    high, low, _, _ = tl.philox(
        tl.load(seeds + row).to(tl.uint64), draw.to(tl.uint32), (draw >> 32).to(tl.uint32), none, none
    )
    fraction = ((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> 11 << 11
    point = tl.umulhi(fraction, tl.sum(mass, 0).to(tl.uint64)).to(tl.int64)
    token, before = columns - 1, tl.sum(mass, 0) * 0
    for start in range(0, columns, BLOCK):
        x = tl.load(source + start + lane, mask=start + lane < columns, other=float("-inf"))
        weight = _weight(x, peak, unit)
        weight = tl.where((_key(x) >= least) & (weight.to(tl.float32) >= light), weight, 0)
        after = before + tl.sum(weight, 0)
        if (before <= point) & (point < after):
            token = start + tl.sum((tl.cumsum(weight, 0) <= point - before).to(tl.int32), 0)
        before = after
    return token
