"""mHC's projection to 24 coefficients and sum of squares on a GPU, x read once; definition: kernels/reference/mhc.py.

The fp32 weight is two bf16 ones, its rounding and what the rounding left: 16 bits of it count, where tf32 has 11, and
x, which is bf16, counts whole. Columns are cut into parts by their number alone, so that a row's bits do not depend on
the batch. One launch, no allocation: it captures into a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.mhc import COLUMNS, PACKED, check_project

_PADDED = PACKED // 2  # coefficients


@dataclass(frozen=True, slots=True)
class ProjectTiling:
    """`rows` of a program, `columns` of a step, `steps` in flight."""

    rows: int
    columns: int
    steps: int
    warps: int


def tiling_for(rows: int) -> ProjectTiling:
    """The tiling that was fastest on an H200 (docs/benchmarks.md)."""
    return ProjectTiling(64, 64, 8, 4) if rows <= 256 else ProjectTiling(128, 64, 4, 4)


def project(x: Tensor, packed: Tensor, z: Tensor, squares: Tensor, tiling: ProjectTiling | None = None) -> None:
    """Fill z fp32 [parts, rows, 24] and squares fp32 [parts, rows] from x bf16 [rows, width] and `pack`'s weight.

    Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    check_project(x, packed, z, squares)
    (rows, width), parts = x.shape, len(z)
    taken = tiling or tiling_for(rows)
    if rows:
        _project[(triton.cdiv(rows, taken.rows) * parts,)](
            x, packed, z, squares, rows, x.stride(0), WIDTH=width, PARTS=parts, ROWS=taken.rows, STEP=taken.columns,
            COLUMNS=COLUMNS, PADDED=_PADDED, AHEAD=taken.steps, num_warps=taken.warps,
        )  # fmt: skip


@triton.jit
def _project(
    x, packed, z, squares, rows, x_stride,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
    PADDED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """ROWS rows by one part of the columns."""
    length: tl.constexpr = WIDTH // PARTS
    part = tl.program_id(0) % PARTS
    first = (tl.program_id(0) // PARTS).to(tl.int64) * ROWS
    row, lane = tl.arange(0, ROWS), tl.arange(0, STEP)
    held = tl.minimum(row, rows - 1 - first).to(tl.int32)  # rows behind the last are its copies: no masks while reading
    source = x + first * x_stride + (held[:, None] * x_stride + part * length + lane[None, :])
    weight = packed + tl.arange(0, 2 * PADDED)[:, None] * WIDTH + part * length + lane[None, :]
    sums = tl.zeros((ROWS, 2 * PADDED), tl.float32)
    total = tl.zeros((ROWS, STEP), tl.float32)
    for step in tl.range(0, length // STEP, num_stages=AHEAD):
        value = tl.load(source + step * STEP)
        sums = tl.dot(value, tl.load(weight + step * STEP).T, sums)
        wide = value.to(tl.float32)
        total += wide * wide
    high, low = tl.split(tl.reshape(sums, (ROWS, PADDED, 2)))
    inside = row < rows - first
    column = tl.arange(0, PADDED)
    place = z + (part * rows + first) * COLUMNS + (row[:, None] * COLUMNS + column[None, :])
    tl.store(place, high + low, mask=inside[:, None] & (column < COLUMNS)[None, :])
    tl.store(squares + (part * rows + first) + row, tl.sum(total, 1), mask=inside)
