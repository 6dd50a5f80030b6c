"""Root-mean-square norm of bf16 rows in torch, with a residual added before and a cast behind it.

sum = bf16(x + residual), y = sum * rsqrt(mean(sum**2) + eps) * weight, rounded to bf16 or cast as in reference/cast.py.
The norm reads the rounded sum: the one that the next layer reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.errors import KernelError


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [rows, width], weight [width] -> [rows, width] in float64."""
    wide = x.to(torch.float64)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(torch.float64)


def add(x: Tensor, residual: Tensor) -> Tensor:
    """The new residual, bf16."""
    return (x.to(torch.float32) + residual.to(torch.float32)).to(torch.bfloat16)


def check_rows(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> None:
    """Raises KernelError unless `tensor` has this type and shape and adjacent columns."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.stride(-1) != 1:
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise KernelError(f"{name} is {found}", fix=f"pass {dtype} {list(shape)}, columns adjacent")
