"""SwiGLU, clamp, routing weight and cast in one pass on a GPU; formula: kernels/reference/swiglu.py.

One launch into memory that is there, no workspace: it captures into a CUDA graph. A group's bits depend on it alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.cast import CastSpec
from kernels.reference.swiglu import check_swiglu
from kernels.triton.cast import Tiling
from kernels.triton.scaling import constants, put_tile, tile_of


def tiling_for(rows: int, inner: int) -> Tiling:
    """The tiling that was fastest on an H200 (docs/benchmarks.md)."""
    columns = min(inner & -inner, 1024)
    return Tiling(1, columns, 8 if rows < 1024 else 2)


def swiglu_cast(
    x: Tensor, limit: float | None, weights: Tensor | None, spec: CastSpec, codes: Tensor, scales: Tensor,
    tiling: Tiling | None = None,
) -> None:  # fmt: skip
    """Fill codes and scales (of any strides) from x bf16 [rows, 2 * inner], limit and weights fp32 [rows].

    Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    check_swiglu(x, limit, weights, spec, codes, scales)
    rows, inner = x.shape[0], x.shape[1] // 2
    if not rows:
        return
    taken = tiling or tiling_for(rows, inner)
    _swiglu_cast[taken.grid(rows, inner, spec)](
        x, codes if weights is None else weights, codes, scales, rows, 0.0 if limit is None else limit,
        x.stride(0), codes.stride(0), *scales.stride(),
        INNER=inner, ROWS=taken.rows, GROUPS=taken.columns // spec.group, CLAMPED=limit is not None,
        WEIGHTED=weights is not None, **constants(spec), num_warps=taken.warps,
    )  # fmt: skip


@triton.jit
def _swiglu_cast(
    x, weights, codes, scales, rows, limit, x_stride, code_stride, scale_stride, scale_step,
    INNER: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, CLAMPED: tl.constexpr, WEIGHTED: tl.constexpr,
    GROUP: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, FLOOR: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """A tile."""
    first, start, column, inside = tile_of(rows, INNER, ROWS, GROUPS, GROUP)
    row = tl.arange(0, ROWS)[:, None, None]
    place = x + first * x_stride + (row * x_stride + column)
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + INNER, mask=inside, other=0.0).to(tl.float32)
    if CLAMPED:  # comparisons that are false for NaN keep it
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    value = gate / (1.0 + tl.exp(-gate)) * up
    if WEIGHTED:
        value *= tl.load(weights + first + row, mask=inside, other=0.0)
    put_tile(
        value, codes, scales, first, start, rows, code_stride, scale_stride, scale_step,
        ROWS, GROUPS, GROUP, SCALE, LARGEST, FLOOR, PACKED,
    )  # fmt: skip
