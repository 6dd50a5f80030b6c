"""RMSNorm on a GPU: plain, and behind an addition and before a cast; formulas: kernels/reference/rms_norm.py.

One launch into memory that is there, no workspace: it captures into a CUDA graph. One program takes one row, so that a
row's bits depend on it alone.
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
from kernels.triton.scaling import constants, e2m1, magnitude, scale_of

MAX_WIDTH = 16_384
_PLAIN = CastSpec(Code.E4M3, 128, Scale.FP32)


@dataclass(frozen=True, slots=True)
class Turns:
    """`programs` take the rows in turns, reading `ahead` of them before they need them; 0: a program for each row."""

    warps: int
    programs: int = 0
    ahead: int = 1


def turns_for(rows: int, width: int, added: bool = False) -> Turns:
    """What was fastest on an H200 (docs/benchmarks.md)."""
    return Turns(8 if width > 2048 else 4)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, turns: Turns | None = None) -> None:
    """Fill out bf16 [rows, width] from x bf16 [rows, width] and weight fp32 or bf16 [width].

    Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    check_rows("out", out, tuple(x.shape))
    _launch(x, None, weight, eps, out, None, _PLAIN, turns)


def add_rms_norm_cast(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, spec: CastSpec, codes: Tensor, scales: Tensor,
    turns: Turns | None = None,
) -> None:  # fmt: skip
    """Add x to residual (both bf16 [rows, width]) in place, and fill codes and scales with the norm of the sum.

    Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    check_rows("residual", residual, tuple(x.shape))
    check_codes(codes, scales, spec, *x.shape)
    _launch(x, residual, weight, eps, codes, scales, spec, turns)


def rms_norm_cast(
    x: Tensor, weight: Tensor, eps: float, spec: CastSpec, codes: Tensor, scales: Tensor, turns: Turns | None = None
) -> None:
    """Fill codes and scales with the norm of x. Raises KernelError as the others do."""
    check_codes(codes, scales, spec, *x.shape)
    _launch(x, None, weight, eps, codes, scales, spec, turns)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None, spec: CastSpec,
    turns: Turns | None,
) -> None:  # fmt: skip
    rows, width = x.shape
    check_rows("x", x, (rows, width))
    if weight.dtype not in (torch.float32, torch.bfloat16) or tuple(weight.shape) != (width,):
        raise KernelError(f"weight is {weight.dtype} {list(weight.shape)}", fix=f"pass fp32 or bf16 [{width}]")
    if width % spec.group or width > MAX_WIDTH:
        raise KernelError(f"rows of {width} columns", fix=f"at most {MAX_WIDTH}, a multiple of {spec.group}")
    if not rows:
        return
    taken = turns or turns_for(rows, width)
    sums, beside = (x, 0) if residual is None else (residual, residual.stride(0))
    strides = (0, 0) if scales is None else scales.stride()
    _norm[(min(rows, taken.programs or rows),)](
        x, sums, weight, out, x if scales is None else scales, rows, eps, x.stride(0), beside, out.stride(0), *strides,
        WIDTH=width, ADDED=residual is not None, CAST=scales is not None, AHEAD=taken.ahead,
        TURNS=bool(taken.programs), GROUPS=triton.next_power_of_2(width // spec.group), **constants(spec),
        num_warps=taken.warps,
    )  # fmt: skip


@triton.jit
def _norm(
    x, residual, weight, out, scales, rows, eps, x_stride, residual_stride, out_stride, scale_stride, scale_step,
    WIDTH: tl.constexpr, ADDED: tl.constexpr, CAST: tl.constexpr, AHEAD: tl.constexpr, TURNS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, FLOOR: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Row program_id(0), or that and every num_programs(0)-th after it."""
    group = tl.arange(0, GROUPS)
    inside = group < WIDTH // GROUP
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if TURNS:  # else behind the sum, where the row is no longer held as it was read
        factor = tl.load(weight + column, mask=inside[:, None], other=0.0).to(tl.float32)
    last = rows if TURNS else tl.program_id(0) + 1
    for turn in tl.range(tl.program_id(0), last, tl.num_programs(0), num_stages=AHEAD):
        row = tl.cast(turn, tl.int64)
        value = tl.load(x + row * x_stride + column, mask=inside[:, None], other=0.0)
        value = value.to(tl.float32)
        if ADDED:
            place = residual + row * residual_stride + column
            other = tl.load(place, mask=inside[:, None], other=0.0).to(tl.float32)
            total = (value + other).to(tl.bfloat16)
            tl.store(place, total, mask=inside[:, None])
            value = total.to(tl.float32)
        mean = tl.sum(tl.sum(value * value, 1), 0) / WIDTH
        if not TURNS:
            factor = tl.load(weight + column, mask=inside[:, None], other=0.0).to(tl.float32)
        value = value * tl.rsqrt(mean + eps) * factor
        if CAST:
            stored, scale = scale_of(tl.max(magnitude(value), 1), SCALE, LARGEST, FLOOR)
            tl.store(scales + row * scale_stride + group * scale_step, stored, mask=inside)
            scale = tl.expand_dims(scale, 1)
            scaled = tl.div_rn(value, scale) if SCALE == 2 else value * scale
            if PACKED:
                low, high = tl.split(tl.reshape(e2m1(scaled), (GROUPS, GROUP // 2, 2)))
                half = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
                byte = (low | (high << 4)).to(tl.uint8)
                tl.store(out + row * out_stride + half, byte, mask=inside[:, None])
            else:
                tl.store(out + row * out_stride + column, scaled.to(tl.float8e4nv), mask=inside[:, None])
        else:
            tl.store(out + row * out_stride + column, value.to(tl.bfloat16), mask=inside[:, None])
