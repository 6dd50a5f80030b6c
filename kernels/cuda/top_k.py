"""Exact top-k by index on a GPU: launches of `top_k.cu`. Shapes, order and ties: reference/top_k.py.

One launch, no workspace, no allocation: it captures into a CUDA graph. A row's bits depend on that row alone: the
result is unique, however many blocks share a row.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.cuda.driver import Kernel, compile_cubin, load
from kernels.errors import KernelError
from kernels.reference.top_k import check_operands

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 1024
_FIXED_BYTES, _UNIT_BYTES = 37_056, 16  # of `Shared` in the source, and of eight scores' upper halves
_MOST_CACHED = 64  # scores a thread
_MOST_SHARED = 16  # where two blocks have room in a multiprocessor
_CLUSTERS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a row is shared: blocks of threads, and the most scores a thread takes of it, a power of two from 8."""

    cluster: int
    each: int
    blocks: int = 1  # of a multiprocessor at a time


class Parameters(ctypes.Structure):
    """Of the launch, as the source has them."""

    _fields_ = [("scores", ctypes.c_void_p), ("lengths", ctypes.c_void_p), ("indices", ctypes.c_void_p),
                ("stride", ctypes.c_uint64), ("columns", ctypes.c_int), ("count", ctypes.c_int)]  # fmt: skip


def top_k(scores: Tensor, lengths: Tensor | None, indices: Tensor) -> None:
    """Fill indices int32 [rows, count] from scores fp32 [rows, columns].

    Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    parameters = parameters_of(scores, lengths, indices)
    rows, columns = scores.shape
    if rows:
        plan = plan_of(rows, columns, _multiprocessors(scores.device.index))
        _kernel(plan, scores.device.index).launch((rows * plan.cluster, 1, 1), parameters)


def parameters_of(scores: Tensor, lengths: Tensor | None, indices: Tensor) -> Parameters:
    """Checked operands of a launch. Raises KernelError."""
    check_operands(scores, indices.shape[-1], lengths)
    if indices.dtype != torch.int32 or indices.shape[:-1] != scores.shape[:1] or not indices.is_contiguous():
        found = f"{indices.dtype} {list(indices.shape)}"
        raise KernelError(f"indices is {found}", fix=f"pass contiguous int32 [{scores.shape[0]}, count]")
    given = 0 if lengths is None else lengths.data_ptr()
    return Parameters(scores.data_ptr(), given, indices.data_ptr(), scores.stride(0), scores.shape[1], indices.shape[1])


def plan_of(rows: int, columns: int, multiprocessors: int) -> Plan:
    """More blocks for a row while multiprocessors would be idle, or while its scores do not stay in shared memory."""
    for cluster in _CLUSTERS:
        each = 8
        while each * THREADS * cluster < columns:
            each *= 2
        busy = each == 8 or rows * cluster * 2 > multiprocessors
        if busy and each <= _MOST_CACHED:
            break
    return Plan(cluster, each, 2 if each <= _MOST_SHARED and rows * cluster > multiprocessors else 1)


def defines_for(plan: Plan) -> dict[str, int]:
    """Macros: blocks that share a row, whether the upper halves of its scores fit into their shared memory, and blocks
    of a multiprocessor."""
    return {"CLUSTER": plan.cluster, "CACHED": int(plan.each <= _MOST_CACHED), "BLOCKS": plan.blocks}


def compile_for(plan: Plan, architecture: str = "sm_90a") -> tuple[bytes, str]:
    """Machine code and the compiler's report; needs no GPU."""
    return compile_cubin(SOURCE, architecture, defines_for(plan))


def shared_bytes(each: int) -> int:
    """Dynamic shared memory of a launch."""
    return _FIXED_BYTES + (THREADS * (each // 8 | 1) * _UNIT_BYTES if each <= _MOST_CACHED else 0)


@functools.cache
def _kernel(plan: Plan, device: int) -> Kernel:
    with torch.cuda.device(device):
        major, minor = torch.cuda.get_device_capability(device)
        cubin, _ = compile_for(plan, f"sm_{major}{minor}")
        return load(cubin, "top_k", THREADS, shared_bytes(plan.each))


@functools.cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
