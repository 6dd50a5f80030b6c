"""Sparse MLA prefill on Hopper: launches of `sparse_prefill.cu`. Shapes and formula: reference/sparse_prefill.py.

One launch, no workspace, no allocation: it captures into a CUDA graph. A query's bits depend on that query alone.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from kernels.cuda.driver import Kernel, compile_cubin, load, tensor_map
from kernels.cuda.paged import TensorMap
from kernels.cuda.spans import ROWS_A_BLOCK
from kernels.errors import KernelError
from kernels.reference.sparse_prefill import NamedLatents, check_operands

THREADS = 384
STATE_BYTES = 1_048  # of latent.cuh: barriers, and numbers by row
SOURCE = Path(__file__).with_suffix(".cu")


class _Parameters(ctypes.Structure):
    _fields_ = [("query", ctypes.c_void_p), ("keys", ctypes.c_void_p), ("output", ctypes.c_void_p),
                ("lse", ctypes.c_void_p), ("indices", ctypes.c_void_p), ("lengths", ctypes.c_void_p),
                ("sink", ctypes.c_void_p), ("stride", ctypes.c_uint64), ("queries", ctypes.c_int),
                ("heads", ctypes.c_int), ("slots", ctypes.c_int), ("listed", ctypes.c_int),
                ("scale", ctypes.c_float), ("before", ctypes.c_char * 44), ("asked", TensorMap),
                ("answered", TensorMap)]  # fmt: skip


def sparse_prefill(
    query: Tensor, named: NamedLatents, sink: Tensor | None, scale: float, output: Tensor, lse: Tensor
) -> None:
    """Fill output bf16 [queries, heads, 512] and lse fp32 [queries, heads].

    Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    check_operands(query, named, sink, output, lse)
    queries, heads, width = query.shape
    if not queries:
        return
    lengths, sinks = (0 if tensor is None else tensor.data_ptr() for tensor in (named.lengths, sink))
    parameters = _Parameters(
        query.data_ptr(), named.keys.data_ptr(), output.data_ptr(), lse.data_ptr(), named.indices.data_ptr(), lengths,
        sinks, named.keys.stride(0) * 2, queries, heads, named.keys.shape[0], named.indices.shape[1],
        scale * math.log2(math.e), b"", _boxes(query), _boxes(output),
    )  # fmt: skip
    device = query.device.index
    blocks = min(queries * -(-heads // ROWS_A_BLOCK), _processors(device))
    _kernel(width, device).launch((blocks, 1, 1), parameters)


def _boxes(rows: Tensor) -> ctypes.Array[ctypes.c_uint64]:
    """Boxes of 64 heads and 64 channels. A contiguous tensor's strides may say anything where an extent is 1."""
    _, heads, width = rows.shape
    rows = rows.as_strided(rows.shape, (heads * width, width, 1))
    return TensorMap.from_buffer_copy(tensor_map(rows, (1, ROWS_A_BLOCK, 64)))


def defines_for(width: int) -> dict[str, int]:
    """Macros the source is compiled with."""
    return {"WIDTH": width}


def compile_for(width: int) -> tuple[bytes, str]:
    """Machine code and the compiler's report; needs no GPU."""
    return compile_cubin(SOURCE, "sm_90a", defines_for(width))


def shared_bytes(width: int) -> int:
    """Dynamic shared memory of a launch, in 64 rows of 64 channels: all but four of queries, 22 of tiles, weights."""
    return 64 * 64 * 2 * (width // 64 - 4 + 22 + 1) + STATE_BYTES


@functools.cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _kernel(width: int, device: int) -> Kernel:
    if torch.cuda.get_device_capability(device)[0] != 9:
        raise KernelError("this kernel is for Hopper (sm_90a)", fix="choose kernels=reference on this GPU")
    with torch.cuda.device(device):
        return load(compile_for(width)[0], "sparse_prefill", THREADS, shared_bytes(width))
