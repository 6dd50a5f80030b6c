"""Sparse MLA decode on Hopper: launches of `sparse_decode.cu`. Shapes, formats and formula: reference/sparse_decode.py.

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
from kernels.errors import KernelError
from kernels.reference.sparse_decode import HEADS_A_BLOCK, RecordKind, SparseCache, check_operands

THREADS = 512
SOURCE = Path(__file__).with_suffix(".cu")
_CODES = {RecordKind.V4: 1, RecordKind.V32: 2, RecordKind.V41_WINDOW: 3, RecordKind.V41_ENTRY: 4}
PAIRS = ((RecordKind.V4, None), (RecordKind.V4, RecordKind.V4), (RecordKind.V32, None),
         (RecordKind.V41_WINDOW, None), (RecordKind.V41_WINDOW, RecordKind.V41_ENTRY))  # fmt: skip


class _Cache(ctypes.Structure):
    _fields_ = [("records", ctypes.c_void_p), ("indices", ctypes.c_void_p), ("lengths", ctypes.c_void_p),
                ("page_bytes", ctypes.c_uint64), ("page_tokens", ctypes.c_int), ("slots", ctypes.c_int),
                ("stride", ctypes.c_int), ("unused", ctypes.c_int)]  # fmt: skip


class _Parameters(ctypes.Structure):
    _fields_ = [("query", ctypes.c_void_p), ("output", ctypes.c_void_p), ("lse", ctypes.c_void_p),
                ("sink", ctypes.c_void_p), ("cache", _Cache * 2), ("heads", ctypes.c_int),
                ("scale", ctypes.c_float)]  # fmt: skip


def sparse_decode(
    query: Tensor, main: SparseCache, extra: SparseCache | None, sink: Tensor | None, scale: float,
    output: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """Fill output bf16 [queries, heads, 512] and lse fp32 [queries, heads].

    Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    check_operands(query, main, extra, sink, output, lse)
    if (main.kind, extra and extra.kind) not in PAIRS:
        raise KernelError(f"no kernel reads {main.kind} with {extra and extra.kind}", fix="use one of the pairs listed")
    parameters = _Parameters(
        query.data_ptr(), output.data_ptr(), lse.data_ptr(), 0 if sink is None else sink.data_ptr(),
        (_Cache * 2)(_cache(main), _cache(extra)), query.shape[1], scale * math.log2(math.e),
    )  # fmt: skip
    grid = (query.shape[0], -(-query.shape[1] // HEADS_A_BLOCK), 1)
    if query.shape[0]:
        _kernel(main.kind, extra and extra.kind, query.device.index).launch(grid, parameters)


def defines_for(main: RecordKind, extra: RecordKind | None) -> dict[str, int]:
    """Macros the source is compiled with."""
    return {"MAIN": _CODES[main], "EXTRA": _CODES[extra] if extra else 0, "WIDTH": main.width}


def compile_for(main: RecordKind, extra: RecordKind | None, architecture: str = "sm_90a") -> tuple[bytes, str]:
    """Machine code and the compiler's report; needs no GPU."""
    return compile_cubin(SOURCE, architecture, defines_for(main, extra))


def shared_bytes(width: int) -> int:
    """Dynamic shared memory of a launch: queries, two tiles of keys, weights, state, and room to align."""
    return 64 * width * 2 * 3 + 64 * 64 * 2 + 96 + 8 * 64


@functools.cache
def _kernel(main: RecordKind, extra: RecordKind | None, device: int) -> Kernel:
    if torch.cuda.get_device_capability(device)[0] != 9:
        raise KernelError("this kernel is for Hopper (sm_90a)", fix="choose kernels=reference on this GPU")
    with torch.cuda.device(device):
        return load(compile_for(main, extra)[0], "sparse_decode", THREADS, shared_bytes(main.width))


def _cache(cache: SparseCache | None) -> _Cache:
    if cache is None:
        return _Cache()
    lengths = 0 if cache.lengths is None else cache.lengths.data_ptr()
    pages = cache.pages
    return _Cache(pages.data_ptr(), cache.indices.data_ptr(), lengths, pages.stride(0), cache.page_tokens,
                  pages.shape[0] * cache.page_tokens, cache.indices.shape[1], 0)  # fmt: skip
