"""A block's way back into mHC's streams on a GPU; formula: kernels/reference/mhc.py.

One launch into memory that is there, no workspace: it captures into a CUDA graph. A row's bits depend on it alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.errors import KernelError
from kernels.reference.mhc import check_coefficients, check_streams
from kernels.reference.rms_norm import check_rows


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
