"""Rotary embedding on a GPU, in place, and norm, rope and cast in one pass; formulas: kernels/reference/rope.py.

One launch into memory that is there, no workspace: it captures into a CUDA graph. A head's bits depend on it and its
position alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.errors import KernelError
from kernels.reference.cast import CastSpec, Code, Scale, check_codes
from kernels.reference.rms_norm import check_rows
from kernels.reference.rope import check_rope
from kernels.triton.scaling import constants, magnitude, scale_of

_PLAIN = CastSpec(Code.E4M3, 128, Scale.FP32)


@dataclass(frozen=True, slots=True)
class HeadTiling:
    """What one program takes: `heads` of one row, with `warps` warps."""

    heads: int
    warps: int


def tiling_for(heads: int, width: int) -> HeadTiling:
    """The tiling that was fastest on an H200 (docs/benchmarks.md)."""
    return HeadTiling(min(triton.next_power_of_2(heads), max(1, 4096 // width)), 2)


def rope(
    x: Tensor, positions: Tensor, cosine: Tensor, sine: Tensor, inverse: bool = False, tiling: HeadTiling | None = None
) -> None:
    """Turn x bf16 [rows, heads, width] in place. Raises KernelError for operands the kernel does not take."""
    check_rope(x, positions, cosine, sine)
    rows, heads, width = x.shape
    taken = tiling or tiling_for(heads, width)
    if rows and heads:
        parts = triton.cdiv(heads, taken.heads)
        _rope[(rows * parts,)](
            x, positions, cosine, sine, heads, x.stride(0), x.stride(1), WIDTH=width, PAIRS=cosine.shape[1],
            HEADS=taken.heads, INVERSE=inverse, num_warps=taken.warps,
        )  # fmt: skip


def norm_rope(
    x: Tensor, weight: Tensor | None, eps: float, positions: Tensor, cosine: Tensor, sine: Tensor, out: Tensor,
    tiling: HeadTiling | None = None,
) -> None:  # fmt: skip
    """Fill out bf16 [rows, heads, width] (it may be x) with the turned norms of x's heads. Raises KernelError."""
    check_rows("out", out, tuple(x.shape))
    _launch(x, weight, eps, positions, cosine, sine, out, None, _PLAIN, tiling)


def norm_rope_cast(
    x: Tensor, weight: Tensor | None, eps: float, positions: Tensor, cosine: Tensor, sine: Tensor, spec: CastSpec,
    codes: Tensor, scales: Tensor, tiling: HeadTiling | None = None,
) -> None:  # fmt: skip
    """Fill E4M3 codes [rows, heads, width] and scales [rows, heads, width / group]. Raises KernelError."""
    if spec.code is not Code.E4M3:
        raise KernelError(f"codes are {spec.code.name}", fix="cast to E4M3")
    check_codes(codes.flatten(0, 1), scales.flatten(0, 1), spec, x.shape[0] * x.shape[1], x.shape[2])
    _launch(x, weight, eps, positions, cosine, sine, codes, scales, spec, tiling)


def _launch(
    x: Tensor, weight: Tensor | None, eps: float, positions: Tensor, cosine: Tensor, sine: Tensor, out: Tensor,
    scales: Tensor | None, spec: CastSpec, tiling: HeadTiling | None,
) -> None:  # fmt: skip
    check_rope(x, positions, cosine, sine)
    rows, heads, width = x.shape
    if weight is not None:
        check_rows("weight", weight, (width,), torch.float32)
    if scales is not None and (width % spec.group or not scales.is_contiguous()):
        raise KernelError(f"{width} channels, a scale per {spec.group}", fix="use whole groups and contiguous scales")
    taken = tiling or tiling_for(heads, width)
    if rows and heads:
        _norm_rope[(rows * triton.cdiv(heads, taken.heads),)](
            x, cosine if weight is None else weight, positions, cosine, sine, out, x if scales is None else scales,
            heads, eps, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
            WIDTH=width, PAIRS=cosine.shape[1], HEADS=taken.heads, WEIGHTED=weight is not None,
            CAST=scales is not None, **constants(spec), num_warps=taken.warps,
        )  # fmt: skip


@triton.jit
def angles(cosine, sine, position, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """Cosine and sine [1, WIDTH / 2] of a position, 1 and 0 for the channels that stay."""
    pair = tl.arange(0, WIDTH // 2)[None, :] - (WIDTH // 2 - PAIRS)
    place = position.to(tl.int64) * PAIRS + pair
    return tl.load(cosine + place, mask=pair >= 0, other=1.0), tl.load(sine + place, mask=pair >= 0, other=0.0)


@triton.jit
def turned(value, cosine, sine):
    """value [HEADS, WIDTH] with its pairs turned."""
    even, odd = tl.split(tl.reshape(value, (value.shape[0], value.shape[1] // 2, 2)))
    both = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    return tl.reshape(both, (value.shape[0], value.shape[1]))


@triton.jit
def _rope(
    x, positions, cosine, sine, heads, x_stride, head_stride,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a row, only the channels that turn."""
    parts = tl.cdiv(heads, HEADS)
    row = (tl.program_id(0) // parts).to(tl.int64)
    head = tl.program_id(0) % parts * HEADS + tl.arange(0, HEADS)[:, None]
    channel = (WIDTH - 2 * PAIRS) + tl.arange(0, 2 * PAIRS)[None, :]
    cos, sin = angles(cosine, sine, tl.load(positions + row), 2 * PAIRS, PAIRS)
    place = x + row * x_stride + (head * head_stride + channel)
    value = tl.load(place, mask=head < heads, other=0.0).to(tl.float32)
    value = turned(value, cos, -sin if INVERSE else sin)
    tl.store(place, value.to(tl.bfloat16), mask=head < heads)


@triton.jit
def _norm_rope(
    x, weight, positions, cosine, sine, out, scales, heads, eps, x_stride, head_stride, out_stride, out_head_stride,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, WEIGHTED: tl.constexpr, CAST: tl.constexpr,
    GROUP: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, FLOOR: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a row."""
    parts = tl.cdiv(heads, HEADS)
    row = (tl.program_id(0) // parts).to(tl.int64)
    first = tl.program_id(0) % parts * HEADS
    head, channel = first + tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = head < heads
    cos, sin = angles(cosine, sine, tl.load(positions + row), WIDTH, PAIRS)
    source = x + row * x_stride + (head * head_stride + channel)
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    unit = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)
    value = value * tl.expand_dims(unit, 1)
    if WEIGHTED:
        value *= tl.load(weight + channel)
    value = turned(value, cos, sin)
    place = out + row * out_stride + (head * out_head_stride + channel)
    if CAST:
        groups: tl.constexpr = WIDTH // GROUP
        value = tl.reshape(value, (HEADS, groups, GROUP))
        stored, scale = scale_of(tl.max(magnitude(value), 2), SCALE, LARGEST, FLOOR)
        beside = (row * heads + head) * groups + tl.arange(0, groups)[None, :]
        tl.store(scales + beside, stored, mask=inside)
        codes = tl.reshape(value * tl.expand_dims(scale, 2), (HEADS, WIDTH)).to(tl.float8e4nv)
        tl.store(place, codes, mask=inside)
    else:
        tl.store(place, value.to(tl.bfloat16), mask=inside)
