"""mHC's coefficients, collapse and post on a GPU, each stream read once; formulas: kernels/reference/mhc.py.

One launch each into memory that is there, no workspace: they capture into CUDA graphs. A row's bits depend on it alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.errors import KernelError
from kernels.reference.mhc import STREAMS, MhcSite, check_pre, check_streams
from kernels.reference.rms_norm import check_rows

_SINKHORN_ROWS = 32


def pre(
    x: Tensor, z: Tensor, squares: Tensor, site: MhcSite, collapsed: Tensor, mixed: Tensor, post_weights: Tensor,
    comb: Tensor, given: Tensor | None = None, warps: int = 8,
) -> None:  # fmt: skip
    """Fill collapsed bf16 [rows, hidden] and fp32 mixed [rows, 4], post_weights [rows, 4], comb [rows, 4, 4].

    x bf16 [rows, 4, hidden], z fp32 [parts, rows, 24] and squares fp32 [parts, rows] of the projection, `given` as in
    the definition. Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    check_pre(x, z, squares, site, given)
    rows, _, hidden = x.shape
    check_rows("collapsed", collapsed, (rows, hidden))
    check_coefficients(rows, mixed=mixed, post_weights=post_weights, comb=comb)
    if not collapsed.is_contiguous():
        raise KernelError("collapsed is not contiguous", fix="pass a contiguous tensor")
    if rows:
        _pre[(rows,)](
            x, z, squares, site.base, site.scale, site.base if site.norm is None else site.norm,
            mixed if given is None else given, collapsed, mixed, post_weights, comb, rows, site.hyper_eps,
            site.norm_eps, HIDDEN=hidden, BLOCK=triton.next_power_of_2(hidden), PARTS=z.shape[0],
            PADDED_PARTS=triton.next_power_of_2(z.shape[0]), ITERATIONS=site.iterations,
            NORMED=site.norm is not None, GIVEN=given is not None, num_warps=warps,
        )  # fmt: skip


def post(
    x: Tensor, block: Tensor, weights: Tensor, comb: Tensor, out: Tensor, columns: int = 1024, warps: int = 4
) -> None:
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
            x, block, weights, comb, out, HIDDEN=hidden, BLOCK=taken, num_warps=min(warps, taken // 256),
        )  # fmt: skip


def sinkhorn(logits: Tensor, iterations: int, eps: float, comb: Tensor) -> None:
    """Fill comb fp32 [rows, 4, 4] from logits of the same shape. Raises KernelError."""
    rows = logits.shape[0]
    check_coefficients(rows, comb=logits)
    check_coefficients(rows, comb=comb)
    if iterations < 1:
        raise KernelError(f"{iterations} iterations", fix="ask for at least one")
    if rows:
        _sinkhorn[(triton.cdiv(rows, _SINKHORN_ROWS),)](
            logits, comb, rows, eps, ITERATIONS=iterations, ROWS=_SINKHORN_ROWS, num_warps=4,
        )  # fmt: skip


def check_coefficients(rows: int, **tensors: Tensor) -> None:
    """Raises KernelError unless these are contiguous fp32, [rows, 4, 4] if called comb, else [rows, 4]."""
    for name, tensor in tensors.items():
        shape = (rows, STREAMS, STREAMS) if name == "comb" else (rows, STREAMS)
        check_rows(name, tensor, shape, torch.float32)
        if not tensor.is_contiguous():
            raise KernelError(f"{name} is not contiguous", fix="pass a contiguous tensor")


@triton.jit
def _doubly_stochastic(logits, ITERATIONS: tl.constexpr, eps):
    """Of [ROWS, 4, 4]."""
    comb = tl.exp(logits - tl.max(logits, 2, keep_dims=True))
    comb = comb / tl.sum(comb, 2, keep_dims=True) + eps
    comb = comb / (tl.sum(comb, 1, keep_dims=True) + eps)
    for _ in range(ITERATIONS - 1):
        comb = comb / (tl.sum(comb, 2, keep_dims=True) + eps)
        comb = comb / (tl.sum(comb, 1, keep_dims=True) + eps)
    return comb


@triton.jit
def _sinkhorn(logits, comb, rows, eps, ITERATIONS: tl.constexpr, ROWS: tl.constexpr):
    """ROWS matrices."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None, None]
    place = row * 16 + tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    given = tl.load(logits + place, mask=row < rows, other=0.0)
    tl.store(comb + place, _doubly_stochastic(given, ITERATIONS, eps), mask=row < rows)


@triton.jit
def _one(values, index: tl.constexpr):
    """Element `index` of [4] as a scalar."""
    return tl.sum(tl.where(tl.arange(0, 4) == index, values, 0.0), 0)


@triton.jit
def _pre(
    x, z, squares, base, scale, norm, given, collapsed, mixed, post_weights, comb, rows, hyper_eps, norm_eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr,
    ITERATIONS: tl.constexpr, NORMED: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    source = x + row * (4 * HIDDEN) + column
    # Asked for first: they arrive while the coefficients are made.
    x0 = tl.load(source, mask=inside, other=0.0)
    x1 = tl.load(source + HIDDEN, mask=inside, other=0.0)
    x2 = tl.load(source + 2 * HIDDEN, mask=inside, other=0.0)
    x3 = tl.load(source + 3 * HIDDEN, mask=inside, other=0.0)
    part, four = tl.arange(0, PADDED_PARTS), tl.arange(0, 4)
    there = part < PARTS
    square = tl.sum(tl.load(squares + part * rows + row, mask=there, other=0.0), 0)
    unit = tl.rsqrt(square / (4 * HIDDEN) + norm_eps)
    from_z = z + (part * rows + row) * 24
    small = from_z[:, None] + four[None, :]
    z_pre = tl.sum(tl.load(small, mask=there[:, None], other=0.0), 0) * unit
    z_post = tl.sum(tl.load(small + 4, mask=there[:, None], other=0.0), 0) * unit
    matrix = 4 * four[:, None] + four[None, :]
    z_comb = tl.sum(tl.load(from_z[:, None, None] + 8 + matrix[None], mask=there[:, None, None], other=0.0), 0) * unit
    weight = tl.sigmoid(z_pre * tl.load(scale) + tl.load(base + four)) + hyper_eps
    tl.store(mixed + row * 4 + four, weight)
    tl.store(post_weights + row * 4 + four, 2.0 * tl.sigmoid(z_post * tl.load(scale + 1) + tl.load(base + 4 + four)))
    logits = z_comb * tl.load(scale + 2) + tl.load(base + 8 + matrix)
    stochastic = _doubly_stochastic(logits[None], ITERATIONS, hyper_eps)
    tl.store(comb + row * 16 + matrix[None], stochastic)
    if GIVEN:
        weight = tl.load(given + row * 4 + four)
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
