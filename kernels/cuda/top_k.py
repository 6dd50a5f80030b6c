"""Exact top-k by index on a GPU: launches of `top_k.cu`. Shapes, order and ties: reference/top_k.py.

One launch, no workspace, no allocation: it captures into a CUDA graph. A row's bits depend on that row alone.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from kernels.cuda.driver import Kernel, compile_cubin, load
from kernels.errors import KernelError
from kernels.reference.top_k import check_operands

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 1024
_FIXED_BYTES, _UNIT_BYTES = 37_008, 16  # of `Shared` in the source, and of eight scores' upper halves
_MOST_CACHED = 64  # scores a thread


class Parameters(ctypes.Structure):
    """Of the launch, as the source has them."""

    _fields_ = [("scores", ctypes.c_void_p), ("lengths", ctypes.c_void_p), ("indices", ctypes.c_void_p),
                ("stride", ctypes.c_uint64), ("columns", ctypes.c_int), ("count", ctypes.c_int)]  # fmt: skip


def top_k(scores: Tensor, lengths: Tensor | None, indices: Tensor) -> None:
    """Fill indices int32 [rows, count] from scores fp32 [rows, columns].

    Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    parameters = parameters_of(scores, lengths, indices)
    if scores.shape[0]:
        _kernel(each_of(scores.shape[1]), scores.device.index).launch((scores.shape[0], 1, 1), parameters)


def parameters_of(scores: Tensor, lengths: Tensor | None, indices: Tensor) -> Parameters:
    """Checked operands of a launch. Raises KernelError."""
    check_operands(scores, indices.shape[-1], lengths)
    if indices.dtype != torch.int32 or indices.shape[:-1] != scores.shape[:1] or not indices.is_contiguous():
        found = f"{indices.dtype} {list(indices.shape)}"
        raise KernelError(f"indices is {found}", fix=f"pass contiguous int32 [{scores.shape[0]}, count]")
    given = 0 if lengths is None else lengths.data_ptr()
    return Parameters(scores.data_ptr(), given, indices.data_ptr(), scores.stride(0), scores.shape[1], indices.shape[1])


def each_of(columns: int) -> int:
    """Scores a thread takes of a row: a power of two."""
    each = 8
    while each * THREADS < columns:
        each *= 2
    return each


def defines_for(each: int) -> dict[str, int]:
    """Macros for rows of which a thread takes `each` scores: whether their upper halves fit into shared memory."""
    return {"CACHED": int(each <= _MOST_CACHED)}


def compile_for(each: int, architecture: str = "sm_90a") -> tuple[bytes, str]:
    """Machine code and the compiler's report; needs no GPU."""
    return compile_cubin(SOURCE, architecture, defines_for(each))


def shared_bytes(each: int) -> int:
    """Dynamic shared memory of a launch."""
    return _FIXED_BYTES + (THREADS * (each // 8 | 1) * _UNIT_BYTES if each <= _MOST_CACHED else 0)


@functools.cache
def _kernel(each: int, device: int) -> Kernel:
    with torch.cuda.device(device):
        major, minor = torch.cuda.get_device_capability(device)
        architecture = f"sm_{major}{minor}"
        return load(compile_for(each, architecture)[0], "top_k", THREADS, shared_bytes(each))
