"""Dense MLA decode on Hopper: launches of `dense_decode.cu`. Shapes and formula: reference/dense_decode.py.

Keys are split into spans of a fixed length, so that the bits of a sequence depend on it and on the span alone; of a
sequence for which these are too few, into longer ones. Nothing is allocated while running: it captures into a CUDA
graph.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from kernels.cuda.driver import Kernel, compile_cubin, load, tensor_map
from kernels.cuda.spans import COMBINE_THREADS, ROWS_A_BLOCK, TILE, Split, Workspace
from kernels.errors import KernelError
from kernels.reference.dense_decode import WIDTH, PagedLatents, check_operands

THREADS = 384
SHARED_BYTES = 64 * WIDTH * 2 * 3 + 64 * 64 * 2 + 20 * 8 + 2 * 64 * 4 + 16
SOURCE = Path(__file__).with_suffix(".cu")


class _Parameters(ctypes.Structure):
    _fields_ = [("keys", ctypes.c_char * 128), ("query", ctypes.c_void_p), ("output", ctypes.c_void_p),
                ("lse", ctypes.c_void_p), ("lengths", ctypes.c_void_p), ("tables", ctypes.c_void_p),
                ("partial", ctypes.c_void_p), ("partial_lse", ctypes.c_void_p), ("rows", ctypes.c_int),
                ("heads", ctypes.c_int), ("page_tokens", ctypes.c_int), ("box", ctypes.c_int),
                ("table_stride", ctypes.c_int), ("span", ctypes.c_int), ("most", ctypes.c_int),
                ("scale", ctypes.c_float), ("unused", ctypes.c_char * 40)]  # fmt: skip


def dense_decode(
    query: Tensor, cache: PagedLatents, scale: float, split: Split, workspace: Workspace, output: Tensor, lse: Tensor
) -> None:
    """Fill output bf16 [batch, tokens, heads, 512] and lse fp32 [batch, tokens, heads].

    A sequence of more than `split.span * split.most` keys is cut into `split.most` equal spans. Raises KernelError for
    operands the kernel does not take, before anything is launched.
    """
    check_operands(query, cache, output, lse)
    batch, tokens, heads = query.shape[:3]
    rows = tokens * heads
    workspace.check(split, batch, rows)
    if not batch:
        return
    box = math.gcd(cache.page_tokens, TILE)
    parameters = _Parameters(
        b"", query.data_ptr(), output.data_ptr(), lse.data_ptr(), cache.lengths.data_ptr(), cache.tables.data_ptr(),
        workspace.partial.data_ptr(), workspace.lse.data_ptr(), rows, heads, cache.page_tokens, box,
        cache.tables.shape[1], split.span, split.most, scale * math.log2(math.e),
    )  # fmt: skip
    ctypes.memmove(ctypes.addressof(parameters), tensor_map(cache.pages, (1, box, 64)), 128)
    device = query.device.index
    _kernel("dense_decode", device).launch((-(-rows // ROWS_A_BLOCK), split.most, batch), parameters)
    if split.most > 1:
        _kernel("combine", device).launch((rows, batch, 1), parameters)


def defines_for() -> dict[str, int]:
    """Macros the source is compiled with."""
    return {}


def compile_for() -> tuple[bytes, str]:
    """Machine code and the compiler's report; needs no GPU."""
    return compile_cubin(SOURCE, "sm_90a", defines_for())


@functools.cache
def _kernel(name: str, device: int) -> Kernel:
    if torch.cuda.get_device_capability(device)[0] != 9:
        raise KernelError("this kernel is for Hopper (sm_90a)", fix="choose kernels=reference on this GPU")
    with torch.cuda.device(device):
        cubin = compile_for()[0]
        if name == "combine":
            return load(cubin, name, COMBINE_THREADS, 0)
        return load(cubin, name, THREADS, SHARED_BYTES)
