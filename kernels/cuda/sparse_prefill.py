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

from kernels.cuda.driver import Kernel, compile_cubin, load
from kernels.cuda.spans import ROWS_A_BLOCK
from kernels.errors import KernelError
from kernels.reference.sparse_prefill import NamedLatents, check_operands

THREADS = 384
_STAYING_BYTES = 32 << 20  # of keys, which the L2 keeps while all queries pass
SOURCE = Path(__file__).with_suffix(".cu")


class _Parameters(ctypes.Structure):
    _fields_ = [("query", ctypes.c_void_p), ("keys", ctypes.c_void_p), ("output", ctypes.c_void_p),
                ("lse", ctypes.c_void_p), ("indices", ctypes.c_void_p), ("lengths", ctypes.c_void_p),
                ("sink", ctypes.c_void_p), ("stride", ctypes.c_uint64), ("queries", ctypes.c_int),
                ("heads", ctypes.c_int), ("slots", ctypes.c_int), ("listed", ctypes.c_int),
                ("scale", ctypes.c_float), ("early", ctypes.c_int)]  # fmt: skip


def sparse_prefill(
    query: Tensor, named: NamedLatents, sink: Tensor | None, scale: float, output: Tensor, lse: Tensor
) -> None:
    """Fill output bf16 [queries, heads, 512] and lse fp32 [queries, heads].

    Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    check_operands(query, named, sink, output, lse)
    queries, heads, width = query.shape
    lengths, sinks = (0 if tensor is None else tensor.data_ptr() for tensor in (named.lengths, sink))
    parameters = _Parameters(
        query.data_ptr(), named.keys.data_ptr(), output.data_ptr(), lse.data_ptr(), named.indices.data_ptr(), lengths,
        sinks, named.keys.stride(0) * 2, queries, heads, named.keys.shape[0], named.indices.shape[1],
        scale * math.log2(math.e), int(is_early(named.keys, heads)),
    )  # fmt: skip
    if queries:
        device = query.device.index
        blocks = min(queries * -(-heads // ROWS_A_BLOCK), _processors(device))
        _kernel(width, device).launch((blocks, 1, 1), parameters)


def is_early(keys: Tensor, heads: int) -> bool:
    """Whether queries come to the L2 ahead of their turn: 1 to 6 % faster, but where few heads' keys come from memory
    they are in the way of these, and it is 7 % slower. Bits are the same."""
    return heads > ROWS_A_BLOCK or keys.numel() * keys.element_size() <= _STAYING_BYTES


def defines_for(width: int) -> dict[str, int]:
    """Macros the source is compiled with."""
    return {"WIDTH": width}


def compile_for(width: int) -> tuple[bytes, str]:
    """Machine code and the compiler's report; needs no GPU."""
    return compile_cubin(SOURCE, "sm_90a", defines_for(width))


def shared_bytes(width: int) -> int:
    """Dynamic shared memory of a launch: queries, two tiles of keys, weights and state."""
    return 64 * width * 2 * 3 + 64 * 64 * 2 + 160 + 2 * 64 * 4 + 16


@functools.cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _kernel(width: int, device: int) -> Kernel:
    if torch.cuda.get_device_capability(device)[0] != 9:
        raise KernelError("this kernel is for Hopper (sm_90a)", fix="choose kernels=reference on this GPU")
    with torch.cuda.device(device):
        return load(compile_for(width)[0], "sparse_prefill", THREADS, shared_bytes(width))
