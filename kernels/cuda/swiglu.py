"""SwiGLU, clamp, routing weight and cast to E4M3 on a GPU: launches of `swiglu.cu`. Formula: reference/swiglu.py.

One launch into memory that is there, no workspace: it captures into a CUDA graph. A group's bits depend on it alone.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from kernels.cuda.tile_plan import UNIT, Plan, address, casting, check_aligned
from kernels.errors import KernelError
from kernels.reference.cast import CastSpec
from kernels.reference.swiglu import check_swiglu

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 256
_SHORT_BYTES = 128 << 20  # of x: a few times the L2
_IDLE_BYTES = 36_000  # of shared memory, so that six blocks are on a multiprocessor and not eight


class Parameters(ctypes.Structure):
    """Of the launch, as the source has them."""

    _fields_ = [("x", ctypes.c_void_p), ("weights", ctypes.c_void_p), ("codes", ctypes.c_void_p),
                ("scales", ctypes.c_void_p), ("x_stride", ctypes.c_uint64), ("code_stride", ctypes.c_uint64),
                ("scale_stride", ctypes.c_uint64), ("scale_step", ctypes.c_uint64), ("rows", ctypes.c_int),
                ("limit", ctypes.c_float)]  # fmt: skip


def swiglu_cast(
    x: Tensor, limit: float | None, weights: Tensor | None, spec: CastSpec, codes: Tensor, scales: Tensor
) -> None:
    """Fill codes and scales (of any strides) from x bf16 [rows, 2 * inner], limit and weights fp32 [rows].

    Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    parameters = parameters_of(x, limit, weights, spec, codes, scales)
    if parameters.rows:
        short = parameters.rows * x.shape[1] * x.element_size() <= _SHORT_BYTES
        plan = plan_for(x.shape[1] // 2, limit is not None, weights is not None, spec, short)
        plan.launch(-(-parameters.rows * x.shape[1] // (2 * UNIT * THREADS)), parameters, x.device)


def parameters_of(
    x: Tensor, limit: float | None, weights: Tensor | None, spec: CastSpec, codes: Tensor, scales: Tensor
) -> Parameters:
    """Checked operands of a launch. Raises KernelError."""
    check_swiglu(x, limit, weights, spec, codes, scales)
    check_aligned(x=x, codes=codes)
    if x.numel() >= 2**32:
        raise KernelError(f"x is {list(x.shape)}", fix="pass fewer rows at a time")
    return Parameters(
        x.data_ptr(), address(weights), codes.data_ptr(), scales.data_ptr(), x.stride(0), codes.stride(0),
        *scales.stride(), x.shape[0], 0.0 if limit is None else limit,
    )  # fmt: skip


def plan_for(inner: int, clamped: bool, weighted: bool, spec: CastSpec, short: bool) -> Plan:
    """The launch for rows of 2 * `inner`; `short`: few enough bytes that what the L2 holds from before counts."""
    flags = {"CLAMPED": int(clamped), "WEIGHTED": int(weighted), "SHORT": int(short)}
    defines = {"INNER": inner, "BLOCK": THREADS, **flags}
    return Plan(SOURCE, {**defines, **casting(spec)}, THREADS, _IDLE_BYTES if short else 0)
