"""mHC on a GPU: coefficients and collapse in one launch, and a block's way back; formulas: kernels/reference/mhc.py.

One launch each into memory that is there, no workspace: they capture into CUDA graphs. A row's bits depend on it alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.errors import KernelError
from kernels.reference.mhc import MhcSite, check_coefficients, check_streams, check_sums
from kernels.reference.rms_norm import check_rows
from kernels.triton.mhc_coefficients import make_coefficients

_MATRICES = 32  # that one program makes, one for each thread of a warp


def pre(
    x: Tensor, z: Tensor, squares: Tensor, site: MhcSite, norm: Tensor | None, collapsed: Tensor, mixed: Tensor,
    post_weights: Tensor, comb: Tensor, given: Tensor | None = None, columns: int = 1024, warps: int | None = None,
) -> None:  # fmt: skip
    """Fill collapsed bf16 [rows, hidden] and fp32 mixed [rows, 4], post_weights [rows, 4], comb [rows, 4, 4].

    x bf16 [rows, 4, hidden]; z fp32 [parts, rows, 24] and squares fp32 [parts, rows] are the projection's; norm fp32
    [hidden] or None. Collapsed by `given` fp32 [rows, 4] (V4.1), else by mixed. Raises KernelError for operands the
    kernel does not take, before anything is launched.
    """
    check_streams("x", x)
    check_sums(z, squares, site)
    (rows, _, hidden), parts = x.shape, len(z)
    check_coefficients(rows, mixed=mixed, post_weights=post_weights, comb=comb)
    if given is not None:
        check_coefficients(rows, given=given)
    check_rows("collapsed", collapsed, (rows, hidden))
    if norm is not None:
        check_rows("norm", norm, (hidden,), torch.float32)
    if not collapsed.is_contiguous() or squares.shape[1] != rows:
        raise KernelError("collapsed has gaps, or z other rows than x", fix=f"pass contiguous tensors of {rows} rows")
    block = triton.next_power_of_2(hidden) if norm is not None else min(columns, hidden & -hidden)
    if rows:
        _pre[(triton.cdiv(rows, _MATRICES) + rows * triton.cdiv(hidden, block),)](
            x, z, squares, site.base, site.scale, site.base if norm is None else norm,
            mixed if given is None else given, collapsed, mixed, post_weights, comb, rows, site.hyper_eps,
            site.norm_eps, HIDDEN=hidden, BLOCK=block, PARTS=parts, PADDED=triton.next_power_of_2(parts),
            ITERATIONS=site.iterations, NORMED=norm is not None, GIVEN=given is not None, MATRICES=_MATRICES,
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
def _one(values, index: tl.constexpr):
    """Element `index` of [4] as a scalar."""
    return tl.sum(tl.where(tl.arange(0, 4) == index, values, 0.0), 0)


@triton.jit
def _pre(
    x, z, squares, base, scale, norm, given, collapsed, mixed, post_weights, comb, rows, hyper_eps, norm_eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, ITERATIONS: tl.constexpr,
    NORMED: tl.constexpr, GIVEN: tl.constexpr, MATRICES: tl.constexpr,
):  # fmt: skip
    """The first programs make the coefficients of MATRICES rows each; the others collapse BLOCK columns of a row, and
    wait for nobody: what they need of the coefficients is little, and made again."""
    makers = tl.cdiv(rows, MATRICES)
    if tl.program_id(0) < makers:
        make_coefficients(
            z, squares, base, scale, mixed, post_weights, comb, rows, tl.program_id(0) * MATRICES, hyper_eps, norm_eps,
            4 * HIDDEN, PARTS, 4, ITERATIONS, MATRICES,
        )  # fmt: skip
    else:
        parts: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
        number = tl.program_id(0) - makers
        row = (number // parts).to(tl.int64)
        column = number % parts * BLOCK + tl.arange(0, BLOCK)
        inside = column < HIDDEN
        source, four = x + row * (4 * HIDDEN) + column, tl.arange(0, 4)
        x0 = tl.load(source, mask=inside, other=0.0)
        x1 = tl.load(source + HIDDEN, mask=inside, other=0.0)
        x2 = tl.load(source + 2 * HIDDEN, mask=inside, other=0.0)
        x3 = tl.load(source + 3 * HIDDEN, mask=inside, other=0.0)
        if GIVEN:
            weight = tl.load(given + row * 4 + four)
        else:
            part = tl.arange(0, PADDED)
            there = part < PARTS
            square = tl.sum(tl.load(squares + part * rows + row, mask=there, other=0.0), 0)
            small = z + (part * rows + row)[:, None] * 24 + four[None, :]
            sums = tl.sum(tl.load(small, mask=there[:, None], other=0.0), 0)
            sums *= tl.rsqrt(square / (4 * HIDDEN) + norm_eps)
            weight = tl.sigmoid(sums * tl.load(scale) + tl.load(base + four)) + hyper_eps
        value = _one(weight, 0) * x0.to(tl.float32) + _one(weight, 1) * x1.to(tl.float32)
        value += _one(weight, 2) * x2.to(tl.float32) + _one(weight, 3) * x3.to(tl.float32)
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
