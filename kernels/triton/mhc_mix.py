"""mHC's streams on a GPU: their collapse to a block's input and its way back; formulas: kernels/reference/mhc.py.

One launch each into memory that is there, no workspace: they capture into CUDA graphs. A row's bits depend on it alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.errors import KernelError
from kernels.reference.mhc import check_coefficients, check_streams
from kernels.reference.rms_norm import check_rows
from kernels.triton.scaling import policy


def collapse(
    x: Tensor, weights: Tensor, norm: Tensor | None, eps: float, collapsed: Tensor, columns: int = 1024,
    warps: int | None = None, leaving: bool = False,
) -> None:  # fmt: skip
    """Fill collapsed bf16 [rows, hidden] from x bf16 [rows, 4, hidden], weights fp32 [rows, 4], norm fp32 [hidden] or
    None. Raises KernelError for operands the kernel does not take, before anything is launched."""
    check_streams("x", x)
    rows, _, hidden = x.shape
    check_coefficients(rows, weights=weights)
    check_rows("collapsed", collapsed, (rows, hidden))
    if norm is not None:
        check_rows("norm", norm, (hidden,), torch.float32)
    if not collapsed.is_contiguous():
        raise KernelError("collapsed is not contiguous", fix="pass a contiguous tensor")
    taken = triton.next_power_of_2(hidden) if norm is not None else min(columns, hidden & -hidden)
    if rows:
        _collapse[(rows * triton.cdiv(hidden, taken),)](
            x, weights, weights if norm is None else norm, collapsed, eps, HIDDEN=hidden, BLOCK=taken,
            NORMED=norm is not None, LEAVING=policy(leaving), num_warps=warps or (4 if norm is None else 8),
        )  # fmt: skip


def post(
    x: Tensor, block: Tensor, weights: Tensor, comb: Tensor, out: Tensor, columns: int = 1024, warps: int = 4,
    leaving: bool = False,
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
            x, block, weights, comb, out, HIDDEN=hidden, BLOCK=taken, LEAVING=policy(leaving),
            num_warps=min(warps, taken // 256),
        )  # fmt: skip


@triton.jit
def _collapse(
    x, weights, norm, collapsed, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr, LEAVING: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one row."""
    parts: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // parts).to(tl.int64)
    column = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    source, given = x + row * (4 * HIDDEN) + column, weights + row * 4
    x0 = tl.load(source, mask=inside, other=0.0, eviction_policy=LEAVING)
    x1 = tl.load(source + HIDDEN, mask=inside, other=0.0, eviction_policy=LEAVING)
    x2 = tl.load(source + 2 * HIDDEN, mask=inside, other=0.0, eviction_policy=LEAVING)
    x3 = tl.load(source + 3 * HIDDEN, mask=inside, other=0.0, eviction_policy=LEAVING)
    value = tl.load(given) * x0.to(tl.float32) + tl.load(given + 1) * x1.to(tl.float32)
    value += tl.load(given + 2) * x2.to(tl.float32) + tl.load(given + 3) * x3.to(tl.float32)
    if NORMED:
        value = value * tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
        value *= tl.load(norm + column, mask=inside, other=0.0)
    tl.store(collapsed + row * HIDDEN + column, value.to(tl.bfloat16), mask=inside)


@triton.jit
def _post(x, block, weights, comb, out, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, LEAVING: tl.constexpr):
    """BLOCK columns of one row."""
    parts: tl.constexpr = HIDDEN // BLOCK
    row = (tl.program_id(0) // parts).to(tl.int64)
    column = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    source = x + row * (4 * HIDDEN) + column
    given = tl.load(block + row * HIDDEN + column, eviction_policy=LEAVING).to(tl.float32)
    x0 = tl.load(source, eviction_policy=LEAVING).to(tl.float32)
    x1 = tl.load(source + HIDDEN, eviction_policy=LEAVING).to(tl.float32)
    x2 = tl.load(source + 2 * HIDDEN, eviction_policy=LEAVING).to(tl.float32)
    x3 = tl.load(source + 3 * HIDDEN, eviction_policy=LEAVING).to(tl.float32)
    for k in tl.static_range(4):
        c = comb + row * 16 + k
        value = tl.load(weights + row * 4 + k) * given
        value += tl.load(c) * x0 + tl.load(c + 4) * x1 + tl.load(c + 8) * x2 + tl.load(c + 12) * x3
        tl.store(out + row * (4 * HIDDEN) + k * HIDDEN + column, value.to(tl.bfloat16))
