"""SwiGLU of an expert, clamped, weighted and cast, in torch.

x holds [gate | up]; y = weight * silu(min(gate, limit)) * clamp(up, -limit, limit), cast as reference/cast.py defines.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.errors import KernelError
from kernels.reference.cast import CastSpec, check_codes


def swiglu(x: Tensor, limit: float | None, weights: Tensor | None) -> Tensor:
    """x [rows, 2 * inner], weights [rows] or None -> [rows, inner] in the precision of x (at least fp32)."""
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    gate, up = wide.chunk(2, 1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    y = torch.nn.functional.silu(gate) * up
    return y if weights is None else y * weights[:, None]


def check_swiglu(
    x: Tensor, limit: float | None, weights: Tensor | None, spec: CastSpec, codes: Tensor, scales: Tensor
) -> None:
    """Raises KernelError naming the first operand that no implementation takes."""
    rows, width = x.shape
    if width % (2 * spec.group) or x.dtype is not torch.bfloat16 or x.stride(1) != 1:
        fix = f"pass bf16 [rows, 2 * inner], columns adjacent, inner a multiple of {spec.group}"
        raise KernelError(f"x is {x.dtype} {list(x.shape)}", fix=fix)
    if limit is not None and not limit > 0:
        raise KernelError(f"limit is {limit}", fix="use a positive limit, or None for none")
    if weights is not None and (weights.dtype != torch.float32 or tuple(weights.shape) != (rows,)):
        raise KernelError(f"weights is {weights.dtype} {list(weights.shape)}", fix=f"pass fp32 [{rows}]")
    check_codes(codes, scales, spec, rows, width // 2)
