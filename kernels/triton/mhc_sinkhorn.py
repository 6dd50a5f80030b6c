"""mHC's Sinkhorn on a GPU, a matrix in each thread's registers; formula: kernels/reference/mhc.py.

One launch into memory that is there: it captures into a CUDA graph.
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
def _four_shares(a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, eps):
    """The same of each row of a matrix, which is then turned: the next step takes the other direction."""
    a0, a1, a2, a3 = _shares(a0, a1, a2, a3, eps)
    b0, b1, b2, b3 = _shares(b0, b1, b2, b3, eps)
    c0, c1, c2, c3 = _shares(c0, c1, c2, c3, eps)
    d0, d1, d2, d3 = _shares(d0, d1, d2, d3, eps)
    return a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2, a3, b3, c3, d3


@triton.jit
def _sinkhorn(logits, comb, rows, eps, ITERATIONS: tl.constexpr, ROWS: tl.constexpr):
    """ROWS matrices; ajk is element k of row j, one for each thread, turned after every step."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    place = row * 16 + tl.arange(0, 16)[None, :]
    given = tl.load(logits + place, mask=row < rows, other=0.0)
    even, odd = tl.split(tl.reshape(given, (ROWS, 8, 2)))
    first, third = tl.split(tl.reshape(even, (ROWS, 4, 2)))
    second, fourth = tl.split(tl.reshape(odd, (ROWS, 4, 2)))
    a0, b0, c0, d0 = _four(first, ROWS)
    a1, b1, c1, d1 = _four(second, ROWS)
    a2, b2, c2, d2 = _four(third, ROWS)
    a3, b3, c3, d3 = _four(fourth, ROWS)
    a0, a1, a2, a3 = _softmax(a0, a1, a2, a3, eps)
    b0, b1, b2, b3 = _softmax(b0, b1, b2, b3, eps)
    c0, c1, c2, c3 = _softmax(c0, c1, c2, c3, eps)
    d0, d1, d2, d3 = _softmax(d0, d1, d2, d3, eps)
    # From here on turned: along columns first, then along rows and columns in turns, columns last.
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = _four_shares(
        a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2, a3, b3, c3, d3, eps
    )
    for _ in range(ITERATIONS - 1):
        for _ in tl.static_range(2):  # two turns move nothing
            a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = _four_shares(
                a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, eps
            )
    upper = tl.join(_joined(a0, a1, a2, a3, ROWS), _joined(b0, b1, b2, b3, ROWS))
    lower = tl.join(_joined(c0, c1, c2, c3, ROWS), _joined(d0, d1, d2, d3, ROWS))
    found = tl.reshape(tl.trans(tl.join(upper, lower), (0, 3, 2, 1)), (ROWS, 16))
    tl.store(comb + place, found, mask=row < rows)
