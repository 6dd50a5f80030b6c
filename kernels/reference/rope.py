"""Rotary embedding of heads, alone and behind a norm, in torch.

Interleaved pairs of the trailing 2 * pairs channels turn by the angle of their row's position; `inverse` turns back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.errors import KernelError
from kernels.reference.norm import rotate
from kernels.reference.rms_norm import check_rows, rms_norm


def rope(x: Tensor, positions: Tensor, cosine: Tensor, sine: Tensor, inverse: bool = False) -> Tensor:
    """x [rows, heads, width], positions int32 [rows], cosine and sine [positions, pairs] -> float64 of x's shape."""
    angles = (cosine.double()[positions.long()][:, None], sine.double()[positions.long()][:, None])
    return rotate(x.to(torch.float64), angles[0], -angles[1] if inverse else angles[1])


def norm_rope(x: Tensor, weight: Tensor | None, eps: float, positions: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """The norm of every head x [rows, heads, width] (weight [width] or None for ones), then rope; float64."""
    ones = torch.ones(x.shape[-1], dtype=torch.float64, device=x.device)
    return rope(rms_norm(x, ones if weight is None else weight, eps), positions, cosine, sine)


def check_rope(x: Tensor, positions: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """Raises KernelError naming the first operand that no implementation takes. Positions beyond the table are the
    caller's mistake."""
    rows, heads, width = x.shape
    check_rows("x", x, (rows, heads, width))
    check_rows("positions", positions, (rows,), torch.int32)
    pairs = cosine.shape[1]
    if pairs & (pairs - 1) or width & (width - 1) or not 4 <= 2 * pairs <= width <= 1024:
        found = f"heads of {width} channels with {pairs} pairs"
        raise KernelError(found, fix="use powers of two, at least 2 pairs and at most 1024 channels")
    for name, table in (("cosine", cosine), ("sine", sine)):
        check_rows(name, table, tuple(cosine.shape), torch.float32)
        if not table.is_contiguous():
            raise KernelError(f"{name} is not contiguous", fix="pass a contiguous table")
