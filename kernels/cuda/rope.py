"""Rotary embedding of whole heads in place on a GPU: launches of `rope.cu`. Formula: reference/rope.py.

One launch, no workspace: it captures into a CUDA graph. A head's bits depend on it and its position alone.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from kernels.cuda.tile_plan import UNIT, Plan, aligned, check_aligned
from kernels.errors import KernelError
from kernels.reference.rope import check_rope

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, _MOST_TURNS = 128, 16
_LEAST_TURNS, _MOST_PARTS = 2, 4  # a row is taken by up to so many blocks, whose threads have that much to do


class Parameters(ctypes.Structure):
    """Of the launch, as the source has them."""

    _fields_ = [("x", ctypes.c_void_p), ("positions", ctypes.c_void_p), ("cosine", ctypes.c_void_p),
                ("sine", ctypes.c_void_p), ("x_stride", ctypes.c_uint64)]  # fmt: skip


def rope(x: Tensor, positions: Tensor, cosine: Tensor, sine: Tensor, inverse: bool = False) -> None:
    """Turn x bf16 [rows, heads, width] in place, all of whose channels turn. Raises KernelError for other operands."""
    check_rope(x, positions, cosine, sine)
    rows, heads, width = x.shape
    if not takes(x, cosine):
        found = f"{list(x.shape)} with {cosine.shape[1]} pairs and strides {x.stride()}"
        raise KernelError(f"x is {found}", fix="turn all channels of heads that lie beside each other")
    check_aligned(cosine=cosine, sine=sine)
    if rows:
        places = (each.data_ptr() for each in (x, positions, cosine, sine))
        plan = plan_for(heads, width, inverse)
        plan.launch(rows * plan.defines["PARTS"], Parameters(*places, x.stride(0)), x.device)


def takes(x: Tensor, cosine: Tensor) -> bool:
    """Whether all channels turn, heads lie beside each other, and a thread has not too many of them."""
    _, heads, width = x.shape
    whole = width == 2 * cosine.shape[1] and width >= UNIT and x.stride(1) == width
    return whole and 0 < heads * width <= THREADS * UNIT * _MOST_TURNS and aligned(x)


def plan_for(heads: int, width: int, inverse: bool) -> Plan:
    """A block for each part of a row, which has whole heads."""
    parts = _MOST_PARTS
    while parts > 1 and (heads % parts or heads // parts * width < _LEAST_TURNS * THREADS * UNIT):
        parts //= 2
    defines = {"HEADS": heads, "WIDTH": width, "BLOCK": THREADS, "PARTS": parts, "INVERSE": int(inverse)}
    return Plan(SOURCE, defines, THREADS)
