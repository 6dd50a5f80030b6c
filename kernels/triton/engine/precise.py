"""Products in fp32 of few outputs on a GPU, as routers and mixings are: split over channels, then summed in order.

The library multiplies them by one block of threads after another, without tensor cores; here three products of TF32
stand for one, and as many programs run as the chip has room for.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.linear import Dense
from kernels.triton.engine.chained import LAUNCH, chain, follow

_PROGRAMS = 264  # two for each multiprocessor of an H200
_MOST_COLUMNS = 512  # above, there is enough to do for the library
_COLUMNS, _DEEP = 64, 64  # of a program: outputs, and channels at a time


def takes(weight: Dense) -> bool:
    """Whether `precise` multiplies with this matrix."""
    groups, columns, _ = weight.matrix.shape
    return not weight.rounds and groups == 1 and columns <= _MOST_COLUMNS


def precise(x: Tensor, weight: Dense, eps: float | None = None) -> Tensor:
    """As reference.linear.linear of x fp32 [rows, channels], whose rows may stand apart; with `eps` of x over the root
    mean square of its rows."""
    rows, (_, columns, inner) = len(x), weight.matrix.shape
    block, wide = 16 if rows <= 64 else 32, max(16, min(_COLUMNS, triton.next_power_of_2(columns)))
    grid = triton.cdiv(rows, block), triton.cdiv(columns, wide)
    wanted = max(1, min(_PROGRAMS // (grid[0] * grid[1]), triton.cdiv(inner, 2 * _DEEP)))
    each = triton.cdiv(triton.cdiv(inner, wanted), _DEEP) * _DEEP
    splits = triton.cdiv(inner, each)
    parts, squares = x.new_empty(splits, rows, columns), x.new_empty(splits, rows)
    _multiply[(splits, *grid)](
        x, x.stride(0), weight.matrix, parts, squares, rows, columns, inner, each, ROWS=block, COLUMNS=wide, DEEP=_DEEP,
        UNIT=eps is not None, num_warps=4, num_stages=3, **LAUNCH,
    )  # fmt: skip
    if splits == 1 and eps is None:
        return parts[0]
    out = x.new_empty(rows, columns)
    _sum[(rows, grid[1])](
        parts, squares, out, splits, rows, columns, inner, 0.0 if eps is None else eps, COLUMNS=wide,
        UNIT=eps is not None, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x, stride, matrix, parts, squares, rows, columns, inner, each, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEEP: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """COLUMNS outputs of ROWS rows over `each` channels, and what the squares of these add up to."""
    split, row = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    line, depth = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEEP)
    source, weights = x + row[:, None].to(tl.int64) * stride, matrix + line[:, None] * inner
    follow()
    chain()
    total, whole = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS,), tl.float32)
    for start in range(split * each, tl.minimum((split + 1) * each, inner), DEEP):
        at = (start + depth)[None, :]
        value = tl.load(source + at, mask=(row < rows)[:, None] & (at < inner), other=0.0)
        weight = tl.load(weights + at, mask=(line < columns)[:, None] & (at < inner), other=0.0)
        total = tl.dot(value, tl.trans(weight), total, input_precision="tf32x3")
        if UNIT:
            whole += tl.sum(value * value, 1)
    target = parts + (split.to(tl.int64) * rows + row[:, None]) * columns + line[None, :]
    tl.store(target, total, mask=(row < rows)[:, None] & (line < columns)[None, :])
    if UNIT and tl.program_id(2) == 0:
        tl.store(squares + split * rows + row, whole, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "splits"])
def _sum(
    parts, squares, out, splits, rows, columns, inner, eps, COLUMNS: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """COLUMNS outputs of one row, of its parts in their order."""
    row, line, lane = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, 16)
    follow()
    chain()
    total, whole = tl.zeros((16, COLUMNS), tl.float32), tl.zeros((16,), tl.float32)
    for first in range(0, splits, 16):
        part = first + lane
        place = (part[:, None].to(tl.int64) * rows + row) * columns + line[None, :]
        total += tl.load(parts + place, mask=(part < splits)[:, None] & (line < columns)[None, :], other=0.0)
        if UNIT:
            whole += tl.load(squares + part * rows + row, mask=part < splits, other=0.0)
    result = tl.sum(total, 0)
    if UNIT:
        result *= tl.rsqrt(tl.sum(whole, 0) / inner + eps)
    tl.store(out + row.to(tl.int64) * columns + line, result, mask=line < columns)
