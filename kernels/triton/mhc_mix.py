"""mHC on a GPU: coefficients and collapse, and a block's way back; formulas: kernels/reference/mhc.py.

Launches into memory that is there, no workspace: they capture into CUDA graphs. A row's bits depend on it alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.errors import KernelError
from kernels.reference.mhc import MhcSite, check_coefficients, check_pre, check_streams
from kernels.reference.rms_norm import check_rows
from kernels.triton.mhc_coefficients import coefficients, make_coefficients

_MATRICES = 32  # that one program makes, one for each thread of a warp


def pre(
    x: Tensor, z: Tensor, squares: Tensor, site: MhcSite, norm: Tensor | None, collapsed: Tensor, mixed: Tensor,
    post_weights: Tensor, comb: Tensor, given: Tensor | None = None, columns: int = 1024, warps: int | None = None,
) -> None:  # fmt: skip
    """Fill collapsed bf16 [rows, hidden] and fp32 mixed [rows, 4], post_weights [rows, 4], comb [rows, 4, 4].

    x bf16 [rows, 4, hidden]; z fp32 [parts, rows, 24] and squares fp32 [parts, rows] are the projection's; norm fp32
    [hidden] or None. Collapsed by `given` fp32 [rows, 4] (V4.1) in one launch, else by mixed in a second. Raises
    KernelError for operands the kernels do not take, before anything is launched.
    """
    check_pre(x, z, squares, site, norm, collapsed, mixed, post_weights, comb, given)
    (rows, _, hidden), parts = x.shape, len(z)
    if not rows:
        return
    made = (z, squares, site.base, site.scale, mixed, post_weights, comb, rows, site.hyper_eps, site.norm_eps)
    makers = triton.cdiv(rows, _MATRICES)
    shape = {"WIDTH": 4 * hidden, "PARTS": parts, "ITERATIONS": site.iterations}
    if given is None:
        coefficients[(makers,)](*made, **shape, TOGETHER=8, ROWS=_MATRICES, num_warps=8)
    block = triton.next_power_of_2(hidden) if norm is not None else min(columns, hidden & -hidden)
    _pre[(makers * (given is not None) + rows * triton.cdiv(hidden, block),)](
        *made, x, mixed if given is None else given, site.base if norm is None else norm, collapsed, **shape,
        HIDDEN=hidden, BLOCK=block, NORMED=norm is not None, MATRICES=_MATRICES, MADE=given is not None,
        num_warps=warps or (4 if norm is None else 8),
    )  # fmt: skip


def post(
    x: Tensor, block: Tensor, weights: Tensor, comb: Tensor, out: Tensor, columns: int = 1024, warps: int = 4,
) -> None:  # fmt: skip
    """Fill out bf16 [rows, 4, hidden] from x, the block's output [rows, hidden], weights and comb fp32.

    `out` may be x. Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    check_streams("x", x)
    check_streams("out", out)
    rows, _, hidden = x.shape
    check_rows("block", block, (rows, hidden))
    check_coefficients(rows, weights=weights, comb=comb)
    if out.shape != x.shape or not block.is_contiguous():
        raise KernelError(f"out is {list(out.shape)} or block has gaps", fix=f"pass {list(x.shape)}, contiguous")
    taken = min(columns, hidden & -hidden)
    if rows:
        _post[(rows * (hidden // taken),)](
            x, block, weights, comb, out, HIDDEN=hidden, BLOCK=taken,
            num_warps=min(warps, taken // 256),
        )  # fmt: skip


@triton.jit
def _pre(
    z, squares, base, scale, mixed, post_weights, comb, rows, hyper_eps, norm_eps, x, weights, norm, collapsed,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, ITERATIONS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
    NORMED: tl.constexpr, MATRICES: tl.constexpr, MADE: tl.constexpr,
):  # fmt: skip
    """A program collapses BLOCK columns of a row; where MADE, the first ones make MATRICES rows' coefficients each."""
    makers = tl.cdiv(rows, MATRICES) if MADE else 0
    if tl.program_id(0) < makers:
        make_coefficients(
            z, squares, base, scale, mixed, post_weights, comb, rows, tl.program_id(0) * MATRICES, hyper_eps, norm_eps,
            WIDTH, PARTS, 4, ITERATIONS, MATRICES,
        )  # fmt: skip
    else:
        parts: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
        number = tl.program_id(0) - makers
        row = (number // parts).to(tl.int64)
        column = number % parts * BLOCK + tl.arange(0, BLOCK)
        inside = column < HIDDEN
        source, given = x + row * (4 * HIDDEN) + column, weights + row * 4
        x0 = tl.load(source, mask=inside, other=0.0)
        x1 = tl.load(source + HIDDEN, mask=inside, other=0.0)
        x2 = tl.load(source + 2 * HIDDEN, mask=inside, other=0.0)
        x3 = tl.load(source + 3 * HIDDEN, mask=inside, other=0.0)
        value = tl.load(given) * x0.to(tl.float32) + tl.load(given + 1) * x1.to(tl.float32)
        value += tl.load(given + 2) * x2.to(tl.float32) + tl.load(given + 3) * x3.to(tl.float32)
        if NORMED:
            value = value * tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + norm_eps)
            value *= tl.load(norm + column, mask=inside, other=0.0)
        tl.store(collapsed + row * HIDDEN + column, value.to(tl.bfloat16), mask=inside)


@triton.jit
def _post(x, block, weights, comb, out, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one row."""
    parts: tl.constexpr = HIDDEN // BLOCK
    row = (tl.program_id(0) // parts).to(tl.int64)
    column = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    source = x + row * (4 * HIDDEN) + column
    given = tl.load(block + row * HIDDEN + column).to(tl.float32)
    x0 = tl.load(source).to(tl.float32)
    x1 = tl.load(source + HIDDEN).to(tl.float32)
    x2 = tl.load(source + 2 * HIDDEN).to(tl.float32)
    x3 = tl.load(source + 3 * HIDDEN).to(tl.float32)
    for k in tl.static_range(4):
        c = comb + row * 16 + k
        value = tl.load(weights + row * 4 + k) * given
        value += tl.load(c) * x0 + tl.load(c + 4) * x1 + tl.load(c + 8) * x2 + tl.load(c + 12) * x3
        tl.store(out + row * (4 * HIDDEN) + k * HIDDEN + column, value.to(tl.bfloat16))
