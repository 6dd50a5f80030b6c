"""Casts of bf16 rows to E4M3 with scales that stand by columns, on a GPU: launches of `cast.cu`.

Formats and rounding: reference/cast.py, bit for bit. One launch into memory that is there, no workspace: it captures
into a CUDA graph. A group's bits depend on it alone.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from kernels.cuda.tile_plan import Plan, casting, check_aligned
from kernels.errors import KernelError
from kernels.reference.cast import CastSpec, check_cast

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, _ROWS, _COLUMNS = 256, 16, 256


class Parameters(ctypes.Structure):
    """Of the launch, as the source has them."""

    _fields_ = [("x", ctypes.c_void_p), ("codes", ctypes.c_void_p), ("scales", ctypes.c_void_p),
                ("x_stride", ctypes.c_uint64), ("code_stride", ctypes.c_uint64), ("scale_stride", ctypes.c_uint64),
                ("scale_step", ctypes.c_uint64), ("rows", ctypes.c_int), ("width", ctypes.c_int)]  # fmt: skip


def cast_rows(x: Tensor, spec: CastSpec, codes: Tensor, scales: Tensor) -> None:
    """Fill codes and scales (of any strides) from x bf16 [rows, width].

    Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    parameters = parameters_of(x, spec, codes, scales)
    if parameters.rows and parameters.width:
        plan = plan_for(spec)
        plan.launch(blocks_of(parameters.rows, parameters.width), parameters, x.device)


def parameters_of(x: Tensor, spec: CastSpec, codes: Tensor, scales: Tensor) -> Parameters:
    """Checked operands of a launch. Raises KernelError."""
    check_cast(x, spec, codes, scales)
    if x.dtype != torch.bfloat16:
        raise KernelError(f"x is {x.dtype}", fix="pass bf16")
    check_aligned(x=x, codes=codes)
    places = (each.data_ptr() for each in (x, codes, scales))
    return Parameters(*places, x.stride(0), codes.stride(0), *scales.stride(), *x.shape)


def blocks_of(rows: int, width: int) -> int:
    """Of a launch."""
    return -(-rows // _ROWS) * -(-width // _COLUMNS)


def plan_for(spec: CastSpec) -> Plan:
    """The launch, a block for so many rows by so many columns."""
    shared_bytes = _COLUMNS // spec.group * _ROWS * spec.scale_type.itemsize
    return Plan(SOURCE, {**casting(spec), "ROWS": _ROWS}, THREADS, shared_bytes)
