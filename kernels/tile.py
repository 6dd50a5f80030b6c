"""Tile operators on a GPU: each call is launched by what was fastest for its operands. Knows shapes, not the kernels.

CUDA C++ or Triton; which took how long is in docs/benchmarks.md. What operands mean stands where they are defined, in
kernels/reference. Results go into memory that is there, without a workspace: calls capture into CUDA graphs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cuda import cast as cuda_cast
from kernels.cuda import mhc_pre
from kernels.cuda import mhc_project as cuda_project
from kernels.cuda import rms_norm as cuda_norm
from kernels.cuda import rope as cuda_rope
from kernels.cuda import swiglu as cuda_swiglu
from kernels.cuda.tile_plan import aligned, capability
from kernels.reference.cast import CastSpec, Code, Scale
from kernels.triton import cast as triton_cast
from kernels.triton import mhc_project as triton_project
from kernels.triton import rms_norm as triton_norm
from kernels.triton import rope as triton_rope
from kernels.triton import swiglu as triton_swiglu

_WIDE = 2048  # columns from which a block has enough to do with one row

pre = mhc_pre.pre


def cast_rows(x: Tensor, spec: CastSpec, codes: Tensor, scales: Tensor) -> None:
    """Fill codes and scales (of any strides) from x bf16 or fp32 [rows, width]. Raises KernelError."""
    bytes_by_columns = spec.scale is Scale.E8M0 and scales.stride(1) > scales.stride(0)
    if bytes_by_columns and x.dtype == torch.bfloat16 and _takes(spec, x, codes):
        cuda_cast.cast_rows(x, spec, codes, scales)
    else:
        triton_cast.cast_rows(x, spec, codes, scales)


def swiglu_cast(
    x: Tensor, limit: float | None, weights: Tensor | None, spec: CastSpec, codes: Tensor, scales: Tensor
) -> None:
    """Fill codes and scales from x bf16 [rows, 2 * inner], limit and weights fp32 [rows]. Raises KernelError."""
    kernel = cuda_swiglu if _takes(spec, x, codes) else triton_swiglu
    kernel.swiglu_cast(x, limit, weights, spec, codes, scales)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Fill out bf16 [rows, width] from x bf16 [rows, width] and weight fp32 or bf16 [width]. Raises KernelError."""
    kernel = cuda_norm if x.shape[1] >= _WIDE and _takes(None, x, weight, out) else triton_norm
    kernel.rms_norm(x, weight, eps, out)


def rms_norm_cast(x: Tensor, weight: Tensor, eps: float, spec: CastSpec, codes: Tensor, scales: Tensor) -> None:
    """Fill codes and scales with the norm of x. Raises KernelError."""
    kernel = cuda_norm if x.shape[1] >= _WIDE and _takes(spec, x, weight, codes) else triton_norm
    kernel.rms_norm_cast(x, weight, eps, spec, codes, scales)


def add_rms_norm_cast(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, spec: CastSpec, codes: Tensor, scales: Tensor
) -> None:
    """Add x to residual in place, and fill codes and scales with the norm of the sum. Raises KernelError."""
    wide = x.shape[1] >= _WIDE
    kernel = cuda_norm if wide and _takes(spec, x, residual, weight, codes) else triton_norm
    kernel.add_rms_norm_cast(x, residual, weight, eps, spec, codes, scales)


def rope(x: Tensor, positions: Tensor, cosine: Tensor, sine: Tensor, inverse: bool = False) -> None:
    """Turn x bf16 [rows, heads, width] in place. Raises KernelError."""
    whole = _takes(None, x, cosine, sine) and cuda_rope.takes(x, cosine)
    (cuda_rope if whole else triton_rope).rope(x, positions, cosine, sine, inverse)


def project(x: Tensor, packed: Tensor, z: Tensor, squares: Tensor) -> None:
    """Fill z fp32 [parts, rows, 24] and squares fp32 [parts, rows] from x bf16 [rows, width] and a packed weight.

    Raises KernelError.
    """
    hopper = x.is_cuda and capability(x.device) == 9 and aligned(x)
    (cuda_project if hopper else triton_project).project(x, packed, z, squares)


def _takes(spec: CastSpec | None, *tensors: Tensor) -> bool:
    """Whether kernels in CUDA C++ make such codes on this device and take these rows."""
    device = tensors[0].device
    makes = spec is None or spec.code is Code.E4M3
    return makes and device.type == "cuda" and capability(device) >= 9 and all(aligned(each) for each in tensors)
