"""mHC's coefficients on a GPU: Sinkhorn with a matrix in each thread's registers; formulas: kernels/reference/mhc.py.

One launch each into memory that is there, no workspace: they capture into CUDA graphs. A row's bits depend on it alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.errors import KernelError
from kernels.reference.mhc import MhcSite, check_coefficients, check_sums

_ROWS = 32  # of a program: one for each thread of a warp


def coefficients(
    z: Tensor, squares: Tensor, width: int, site: MhcSite, mixed: Tensor, post_weights: Tensor, comb: Tensor,
    warps: int = 1,
) -> None:  # fmt: skip
    """Fill fp32 mixed [rows, 4], post_weights [rows, 4], comb [rows, 4, 4] from the projection's sums over `width`
    columns, z fp32 [parts, rows, 24] and squares fp32 [parts, rows]. Raises KernelError."""
    check_sums(z, squares, site)
    parts, rows = squares.shape
    check_coefficients(rows, mixed=mixed, post_weights=post_weights, comb=comb)
    if rows:
        _coefficients[(triton.cdiv(rows, _ROWS),)](
            z, squares, site.base, site.scale, mixed, post_weights, comb, rows, site.hyper_eps, site.norm_eps,
            WIDTH=width, PARTS=parts, ITERATIONS=site.iterations, ROWS=_ROWS, num_warps=warps,
        )  # fmt: skip


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
def _doubly_stochastic(logits, eps, ITERATIONS: tl.constexpr, ROWS: tl.constexpr):
    """Of [ROWS, 16]: matrices row by row; xjk is element k of row j, one for each thread."""
    zero, one, two, three = _quarters(logits, ROWS, 16)
    x00, x10, x20, x30 = _four(zero, ROWS)
    x01, x11, x21, x31 = _four(one, ROWS)
    x02, x12, x22, x32 = _four(two, ROWS)
    x03, x13, x23, x33 = _four(three, ROWS)
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
    given = tl.load(logits + place, mask=row < rows, other=0.0)
    tl.store(comb + place, _doubly_stochastic(given, eps, ITERATIONS, ROWS), mask=row < rows)


@triton.jit
def _coefficients(
    z, squares, base, scale, mixed, post_weights, comb, rows, hyper_eps, norm_eps,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, ITERATIONS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    few, many = tl.arange(0, 4)[None, :], tl.arange(0, 16)[None, :]
    pre, post = tl.zeros((ROWS, 4), tl.float32), tl.zeros((ROWS, 4), tl.float32)
    logits, square = tl.zeros((ROWS, 16), tl.float32), tl.zeros((ROWS,), tl.float32)
    for part in tl.static_range(PARTS):
        place = z + (part * rows + row)[:, None] * 24
        pre += tl.load(place + few, mask=inside[:, None], other=0.0)
        post += tl.load(place + 4 + few, mask=inside[:, None], other=0.0)
        logits += tl.load(place + 8 + many, mask=inside[:, None], other=0.0)
        square += tl.load(squares + part * rows + row, mask=inside, other=0.0)
    unit = tl.rsqrt(square / WIDTH + norm_eps)[:, None]
    pre = tl.sigmoid(pre * unit * tl.load(scale) + tl.load(base + few)) + hyper_eps
    post = 2.0 * tl.sigmoid(post * unit * tl.load(scale + 1) + tl.load(base + 4 + few))
    logits = logits * unit * tl.load(scale + 2) + tl.load(base + 8 + many)
    tl.store(mixed + row[:, None] * 4 + few, pre, mask=inside[:, None])
    tl.store(post_weights + row[:, None] * 4 + few, post, mask=inside[:, None])
    found = _doubly_stochastic(logits, hyper_eps, ITERATIONS, ROWS)
    tl.store(comb + row[:, None] * 16 + many, found, mask=inside[:, None])
