"""mHC's coefficients on a GPU: Sinkhorn with a matrix in each thread's registers; formulas: kernels/reference/mhc.py.

`sinkhorn` is one launch into memory that is there: it captures into a CUDA graph. The rest is for kernels to call.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.errors import KernelError
from kernels.reference.mhc import check_coefficients

_ROWS = 32  # of a program: one for each thread of a warp


def sinkhorn(logits: Tensor, iterations: int, eps: float, comb: Tensor, warps: int = 1) -> None:
    """Fill comb fp32 [rows, 4, 4] from logits of the same shape. Raises KernelError."""
    rows = logits.shape[0]
    check_coefficients(rows, comb=logits)
    check_coefficients(rows, comb=comb)
    if iterations < 1:
        raise KernelError(f"{iterations} iterations", fix="ask for at least one")
    if rows:
        _sinkhorn[(triton.cdiv(rows, _ROWS),)](
            logits, comb, rows, eps, ITERATIONS=iterations, ROWS=_ROWS, num_warps=warps
        )  # fmt: skip


@triton.jit
def _quarters(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Columns of [ROWS, WIDTH] by their number modulo 4."""
    even, odd = tl.split(tl.reshape(x, (ROWS, WIDTH // 2, 2)))
    first, third = tl.split(tl.reshape(even, (ROWS, WIDTH // 4, 2)))
    second, fourth = tl.split(tl.reshape(odd, (ROWS, WIDTH // 4, 2)))
    return first, second, third, fourth


@triton.jit
def _four(x, ROWS: tl.constexpr):
    """Columns of [ROWS, 4], each [ROWS]."""
    even, odd = tl.split(tl.reshape(x, (ROWS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _joined(a, b, c, d, ROWS: tl.constexpr):
    """Four times [ROWS] as the columns of [ROWS, 4]."""
    return tl.reshape(tl.trans(tl.join(tl.join(a, b), tl.join(c, d)), (0, 2, 1)), (ROWS, 4))


@triton.jit
def _softmax(a, b, c, d, eps):
    most = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - most), tl.exp(b - most), tl.exp(c - most), tl.exp(d - most)
    unit = 1.0 / (a + b + (c + d))
    return a * unit + eps, b * unit + eps, c * unit + eps, d * unit + eps


@triton.jit
def _shares(a, b, c, d, eps):
    """Each over the sum of all four."""
    unit = 1.0 / (a + b + (c + d) + eps)
    return a * unit, b * unit, c * unit, d * unit


@triton.jit
def _eight(x, ROWS: tl.constexpr):
    """Columns of [ROWS, 8], each [ROWS]."""
    zero, one, two, three = _quarters(x, ROWS, 8)
    x0, x4 = tl.split(zero)
    x1, x5 = tl.split(one)
    x2, x6 = tl.split(two)
    x3, x7 = tl.split(three)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _doubly_stochastic(
    x00, x01, x02, x03, x10, x11, x12, x13, x20, x21, x22, x23, x30, x31, x32, x33, eps,
    ITERATIONS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """[ROWS, 16], matrices row by row; xjk is element k of row j, one for each thread."""
    x00, x01, x02, x03 = _softmax(x00, x01, x02, x03, eps)
    x10, x11, x12, x13 = _softmax(x10, x11, x12, x13, eps)
    x20, x21, x22, x23 = _softmax(x20, x21, x22, x23, eps)
    x30, x31, x32, x33 = _softmax(x30, x31, x32, x33, eps)
    x00, x10, x20, x30 = _shares(x00, x10, x20, x30, eps)
    x01, x11, x21, x31 = _shares(x01, x11, x21, x31, eps)
    x02, x12, x22, x32 = _shares(x02, x12, x22, x32, eps)
    x03, x13, x23, x33 = _shares(x03, x13, x23, x33, eps)
    for _ in range(ITERATIONS - 1):
        x00, x01, x02, x03 = _shares(x00, x01, x02, x03, eps)
        x10, x11, x12, x13 = _shares(x10, x11, x12, x13, eps)
        x20, x21, x22, x23 = _shares(x20, x21, x22, x23, eps)
        x30, x31, x32, x33 = _shares(x30, x31, x32, x33, eps)
        x00, x10, x20, x30 = _shares(x00, x10, x20, x30, eps)
        x01, x11, x21, x31 = _shares(x01, x11, x21, x31, eps)
        x02, x12, x22, x32 = _shares(x02, x12, x22, x32, eps)
        x03, x13, x23, x33 = _shares(x03, x13, x23, x33, eps)
    upper = tl.join(_joined(x00, x01, x02, x03, ROWS), _joined(x10, x11, x12, x13, ROWS))
    lower = tl.join(_joined(x20, x21, x22, x23, ROWS), _joined(x30, x31, x32, x33, ROWS))
    return tl.reshape(tl.trans(tl.join(upper, lower), (0, 3, 2, 1)), (ROWS, 16))


@triton.jit
def _sinkhorn(logits, comb, rows, eps, ITERATIONS: tl.constexpr, ROWS: tl.constexpr):
    """ROWS matrices."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    place = row * 16 + tl.arange(0, 16)[None, :]
    zero, one, two, three = _quarters(tl.load(logits + place, mask=row < rows, other=0.0), ROWS, 16)
    x00, x10, x20, x30 = _four(zero, ROWS)
    x01, x11, x21, x31 = _four(one, ROWS)
    x02, x12, x22, x32 = _four(two, ROWS)
    x03, x13, x23, x33 = _four(three, ROWS)
    found = _doubly_stochastic(
        x00, x01, x02, x03, x10, x11, x12, x13, x20, x21, x22, x23, x30, x31, x32, x33, eps, ITERATIONS, ROWS
    )
    tl.store(comb + place, found, mask=row < rows)


@triton.jit
def _scaled(x, unit, scale, base, column: tl.constexpr):
    return x * unit * scale + tl.load(base + column)


@triton.jit
def make_coefficients(
    z, squares, base, scale, mixed, post_weights, comb, rows, first, hyper_eps, norm_eps,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, TOGETHER: tl.constexpr, ITERATIONS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """All three of ROWS rows from `first` on; TOGETHER parts of their sums are read at a time."""
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, 32)
    total, square = tl.zeros((ROWS, 32), tl.float32), tl.zeros((ROWS,), tl.float32)
    for start in tl.static_range(0, PARTS, TOGETHER):
        part = start + tl.arange(0, TOGETHER)
        place = squares + part[:, None] * rows + row[None, :]
        inside = (part < PARTS)[:, None] & (row < rows)[None, :]
        square += tl.sum(tl.load(place, mask=inside, other=0.0), 0)
        place = z + (part[:, None, None] * rows + row[None, :, None]) * 24 + column[None, None, :]
        total += tl.sum(tl.load(place, mask=inside[:, :, None] & (column < 24)[None, None, :], other=0.0), 0)
    u = tl.rsqrt(square / WIDTH + norm_eps)
    # By their number modulo 4, then divided by 4: pre, post, the rows of comb, and two times nothing.
    zero, one, two, three = _quarters(total, ROWS, 32)
    a0, b0, x00, x10, x20, x30, _, _ = _eight(zero, ROWS)
    a1, b1, x01, x11, x21, x31, _, _ = _eight(one, ROWS)
    a2, b2, x02, x12, x22, x32, _, _ = _eight(two, ROWS)
    a3, b3, x03, x13, x23, x33, _, _ = _eight(three, ROWS)
    s, t, c = tl.load(scale), tl.load(scale + 1), tl.load(scale + 2)
    few, many, there = tl.arange(0, 4)[None, :], tl.arange(0, 16)[None, :], (row < rows)[:, None]
    a = _joined(_scaled(a0, u, s, base, 0), _scaled(a1, u, s, base, 1), _scaled(a2, u, s, base, 2),
                _scaled(a3, u, s, base, 3), ROWS)  # fmt: skip
    tl.store(mixed + row[:, None] * 4 + few, tl.sigmoid(a) + hyper_eps, mask=there)
    b = _joined(_scaled(b0, u, t, base, 4), _scaled(b1, u, t, base, 5), _scaled(b2, u, t, base, 6),
                _scaled(b3, u, t, base, 7), ROWS)  # fmt: skip
    tl.store(post_weights + row[:, None] * 4 + few, 2.0 * tl.sigmoid(b), mask=there)
    found = _doubly_stochastic(
        _scaled(x00, u, c, base, 8), _scaled(x01, u, c, base, 9), _scaled(x02, u, c, base, 10),
        _scaled(x03, u, c, base, 11), _scaled(x10, u, c, base, 12), _scaled(x11, u, c, base, 13),
        _scaled(x12, u, c, base, 14), _scaled(x13, u, c, base, 15), _scaled(x20, u, c, base, 16),
        _scaled(x21, u, c, base, 17), _scaled(x22, u, c, base, 18), _scaled(x23, u, c, base, 19),
        _scaled(x30, u, c, base, 20), _scaled(x31, u, c, base, 21), _scaled(x32, u, c, base, 22),
        _scaled(x33, u, c, base, 23), hyper_eps, ITERATIONS, ROWS,
    )  # fmt: skip
    tl.store(comb + row[:, None] * 16 + many, found, mask=there)


@triton.jit
def coefficients(
    z, squares, base, scale, mixed, post_weights, comb, rows, hyper_eps, norm_eps,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, TOGETHER: tl.constexpr, ITERATIONS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows."""
    make_coefficients(
        z, squares, base, scale, mixed, post_weights, comb, rows, tl.program_id(0) * ROWS, hyper_eps, norm_eps,
        WIDTH, PARTS, TOGETHER, ITERATIONS, ROWS,
    )  # fmt: skip
