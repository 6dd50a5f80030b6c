"""RMSNorm on a GPU, plain, before a cast to E4M3, and behind an addition: launches of `rms_norm.cu`.

Formulas: reference/rms_norm.py. One launch into memory that is there, no workspace: it captures into a CUDA graph. A
row's bits depend on it alone.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from kernels.cuda.tile_plan import WARP, Plan, address, casting, check_aligned, threads_of
from kernels.errors import KernelError
from kernels.reference.cast import CastSpec, check_codes
from kernels.reference.rms_norm import check_rows

SOURCE = Path(__file__).with_suffix(".cu")
MAX_WIDTH = 16_384
_PLAIN_TURNS, _TURNS, _ADDED_TURNS = 4, 2, 3  # of a thread, 16 bytes in each
_PLAIN_THREADS = 1792  # of a multiprocessor, which leaves 36 registers each


class Parameters(ctypes.Structure):
    """Of the launch, as the source has them."""

    _fields_ = [("x", ctypes.c_void_p), ("residual", ctypes.c_void_p), ("weight", ctypes.c_void_p),
                ("out", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("x_stride", ctypes.c_uint64),
                ("residual_stride", ctypes.c_uint64), ("out_stride", ctypes.c_uint64),
                ("scale_stride", ctypes.c_uint64), ("scale_step", ctypes.c_uint64), ("rows", ctypes.c_int),
                ("eps", ctypes.c_float)]  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Fill out bf16 [rows, width] from x bf16 [rows, width] and weight fp32 or bf16 [width].

    Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    _launch(x, None, weight, eps, None, out, None)


def add_rms_norm_cast(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, spec: CastSpec, codes: Tensor, scales: Tensor
) -> None:
    """Add x to residual (both bf16 [rows, width]) in place, and fill codes and scales with the norm of the sum."""
    _launch(x, residual, weight, eps, spec, codes, scales)


def rms_norm_cast(x: Tensor, weight: Tensor, eps: float, spec: CastSpec, codes: Tensor, scales: Tensor) -> None:
    """Fill codes and scales with the norm of x."""
    _launch(x, None, weight, eps, spec, codes, scales)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, spec: CastSpec | None, out: Tensor,
    scales: Tensor | None,
) -> None:  # fmt: skip
    parameters = parameters_of(x, residual, weight, eps, spec, out, scales)
    if parameters.rows:
        plan = plan_for(x.shape[1], residual is not None, weight.dtype == torch.float32, spec)
        plan.launch(parameters.rows, parameters, x.device)


def parameters_of(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, spec: CastSpec | None, out: Tensor,
    scales: Tensor | None,
) -> Parameters:  # fmt: skip
    """Checked operands of a launch. Raises KernelError."""
    rows, width = x.shape
    check_rows("x", x, (rows, width))
    if residual is not None:
        check_rows("residual", residual, (rows, width))
    if spec is None or scales is None:
        check_rows("out", out, (rows, width))
    else:
        check_codes(out, scales, spec, rows, width)
    if weight.dtype not in (torch.float32, torch.bfloat16) or tuple(weight.shape) != (width,):
        raise KernelError(f"weight is {weight.dtype} {list(weight.shape)}", fix=f"pass fp32 or bf16 [{width}]")
    if width % 128 or width > MAX_WIDTH:
        raise KernelError(f"rows of {width} columns", fix=f"at most {MAX_WIDTH}, a multiple of 128")
    check_aligned(x=x, residual=residual, weight=weight, out=out)
    strides = (0, 0) if scales is None else scales.stride()
    return Parameters(
        x.data_ptr(), address(residual), weight.data_ptr(), out.data_ptr(), address(scales), x.stride(0),
        0 if residual is None else residual.stride(0), out.stride(0), *strides, rows, eps,
    )  # fmt: skip


def plan_for(width: int, added: bool, wide: bool, spec: CastSpec | None) -> Plan:
    """A block for each row of `width`; weights are fp32 where `wide`."""
    plain = spec is None and not added
    threads = threads_of(width, _ADDED_TURNS if added else _PLAIN_TURNS if plain else _TURNS)
    resident = min(_PLAIN_THREADS // threads, 32) if plain else 1
    defines = {"WIDTH": width, "BLOCK": threads, "RESIDENT": resident, "ADDED": int(added), "WIDE": int(wide)}
    return Plan(SOURCE, {**defines, **casting(spec)}, threads, threads // WARP * 4)
