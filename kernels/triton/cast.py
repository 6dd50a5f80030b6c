"""Casts to scaled E4M3 and E2M1 on a GPU; formats and rounding: kernels/reference/cast.py, bit for bit.

One launch into memory that is there, no workspace: it captures into a CUDA graph. A group's bits depend on it alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.errors import KernelError
from kernels.reference.cast import CastSpec, Code, Scale, check_cast
from kernels.triton.scaling import constants, magnitude, put_tile, scale_of, tile_of


@dataclass(frozen=True, slots=True)
class Tiling:
    """What one program takes: `rows` by `columns`, with `warps` warps."""

    rows: int
    columns: int
    warps: int

    def grid(self, rows: int, width: int, spec: CastSpec) -> tuple[int]:
        """How many programs [rows, width] take. Raises KernelError where tiles do not fill rows or groups not tiles."""
        if width % self.columns or self.columns % spec.group:
            raise KernelError(f"tiles of {self.columns} columns", fix=f"use a part of {width}, whole groups")
        return (triton.cdiv(rows, self.rows) * (width // self.columns),)


def tiling_for(rows: int, width: int, packed: bool = False) -> Tiling:
    """The tiling that was fastest on an H200 (docs/benchmarks.md)."""
    columns = min(width & -width, 1024)
    return Tiling(1, columns, 8) if rows < 1024 else Tiling(2, columns, 2 if packed else 4)


def cast_rows(x: Tensor, spec: CastSpec, codes: Tensor, scales: Tensor, tiling: Tiling | None = None) -> None:
    """Fill codes and scales (of any strides, so that scales may stand by columns) from x bf16 or fp32 [rows, width].

    Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    check_cast(x, spec, codes, scales)
    rows, width = x.shape
    if not rows:
        return
    taken = tiling or tiling_for(rows, width, spec.code is Code.E2M1)
    _cast_rows[taken.grid(rows, width, spec)](
        x, codes, scales, rows, x.stride(0), codes.stride(0), *scales.stride(),
        WIDTH=width, ROWS=taken.rows, GROUPS=taken.columns // spec.group, **constants(spec), num_warps=taken.warps,
    )  # fmt: skip


def cast_blocks(x: Tensor, scale: Scale, codes: Tensor, scales: Tensor, size: int = 128, warps: int = 8) -> None:
    """Fill E4M3 codes [rows, width] and one scale for each `size` x `size` block from x bf16 or fp32 [rows, width].

    Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    rows, width = x.shape
    blocks = (triton.cdiv(rows, size), triton.cdiv(width, size))
    spec = CastSpec(Code.E4M3, 128, scale)
    wanted = ((codes, spec.code_type, (rows, width)), (scales, spec.scale_type, blocks))
    for name, (tensor, dtype, shape) in zip(("codes", "scales"), wanted, strict=True):
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.stride(1) != 1:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise KernelError(f"{name} is {found}", fix=f"pass {dtype} {list(shape)}, columns adjacent")
    if x.dtype not in (torch.bfloat16, torch.float32) or x.stride(1) != 1 or size not in (32, 64, 128):
        found = f"{x.dtype} {list(x.shape)} in blocks of {size}"
        raise KernelError(f"x is {found}", fix="pass bf16 or fp32, columns adjacent, and blocks of 32, 64 or 128")
    if rows and width:
        _cast_blocks[(blocks[0] * blocks[1],)](
            x, codes, scales, rows, width, x.stride(0), codes.stride(0), scales.stride(0),
            SIZE=size, SCALE=scale.value, LARGEST=448.0, FLOOR=spec.floor,
            num_warps=warps,
        )  # fmt: skip


@triton.jit
def _cast_rows(
    x, codes, scales, rows, x_stride, code_stride, scale_stride, scale_step,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, FLOOR: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """A tile."""
    first, start, column, inside = tile_of(rows, WIDTH, ROWS, GROUPS, GROUP)
    place = x + first * x_stride + (tl.arange(0, ROWS)[:, None, None] * x_stride + column)
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    put_tile(
        value, codes, scales, first, start, rows, code_stride, scale_stride, scale_step,
        ROWS, GROUPS, GROUP, SCALE, LARGEST, FLOOR, PACKED,
    )  # fmt: skip


@triton.jit
def _cast_blocks(
    x, codes, scales, rows, width, x_stride, code_stride, scale_stride,
    SIZE: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """One block; neighbours stand beside each other in a row of blocks."""
    across = tl.cdiv(width, SIZE)
    down, right = tl.program_id(0) // across, tl.program_id(0) % across
    first = down.to(tl.int64) * SIZE
    row, column = tl.arange(0, SIZE)[:, None], right * SIZE + tl.arange(0, SIZE)[None, :]
    inside = (row < rows - first) & (column < width)
    value = tl.load(x + first * x_stride + (row * x_stride + column), mask=inside, other=0.0)
    value = value.to(tl.float32)
    largest = tl.max(tl.max(magnitude(value), 1), 0)
    stored, factor = scale_of(largest, SCALE, LARGEST, FLOOR)
    tl.store(scales + down * scale_stride + right, stored)
    tl.store(
        codes + first * code_stride + (row * code_stride + column), (value * factor).to(tl.float8e4nv), mask=inside
    )
