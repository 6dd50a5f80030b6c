"""Greedy choice on a GPU: programs share a row, and one joins what they found. Knows no sampling."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.engine.chained import LAUNCH, chain, follow

_TOKENS = 1024  # that one program looks at


def likeliest(logits: Tensor) -> Tensor:
    """As kernels.likeliest.likeliest; of a row that is not finite the token is any."""
    (rows, width), parts = logits.shape, triton.cdiv(logits.shape[1], _TOKENS)
    peaks = logits.new_empty(rows, parts)
    places = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(2, rows, dtype=torch.int64, device=logits.device)
    _look[(parts, rows)](logits, logits.stride(0), peaks, places, width, TOKENS=_TOKENS, num_warps=4, **LAUNCH)
    _join[(rows,)](
        peaks, places, out, rows, width, PARTS=parts, WIDE=triton.next_power_of_2(parts), num_warps=4, **LAUNCH
    )  # fmt: skip
    return out


@triton.jit
def _look(logits, stride, peaks, places, width, TOKENS: tl.constexpr):
    """The best of TOKENS tokens and where it is first; -1 where one of them is not finite."""
    follow()
    chain()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = part * TOKENS + tl.arange(0, TOKENS)
    inside = at < width
    value = tl.load(logits + row * stride + at, mask=inside, other=0.0)
    finite = tl.min((value - value == 0).to(tl.int32), 0)
    value = tl.where(inside, value, -float("inf"))
    peak = tl.max(value, 0)
    place = tl.min(tl.where(inside & (value == peak), at, width), 0)
    tl.store(peaks + row * tl.num_programs(0) + part, peak)
    tl.store(places + row * tl.num_programs(0) + part, tl.where(finite == 1, place, -1))


@triton.jit
def _join(peaks, places, out, rows, width, PARTS: tl.constexpr, WIDE: tl.constexpr):
    follow()
    chain()
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    peak = tl.load(peaks + row * PARTS + part, mask=part < PARTS, other=-float("inf"))
    place = tl.load(places + row * PARTS + part, mask=part < PARTS, other=0)
    token = tl.min(tl.where((part < PARTS) & (peak == tl.max(peak, 0)), place, width), 0)
    tl.store(out + row, tl.minimum(tl.maximum(token, 0), width - 1).to(tl.int64))
    tl.store(out + rows + row, (tl.min(place, 0) >= 0).to(tl.int64))
