"""Dense MLA decode over FP8 records on Hopper: launches of `dense_decode_fp8.cu`. Formula: reference/dense_decode.py.

Queries and weights are rounded to E4M3 (the first with a scale for each row, the second times the scales of their
keys), so that products run in FP8: outputs are within a few hundredths of the definition's. Keys are split as in
`dense_decode.py`; nothing is allocated while running.
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
from kernels.reference.dense_decode import PagedRecords, check_operands
from kernels.reference.sparse_decode import RecordKind

THREADS, RECORD = 512, RecordKind.V32.value
SHARED_BYTES = 204_800 + 2_992
SOURCE = Path(__file__).with_suffix(".cu")


class _Parameters(ctypes.Structure):
    _fields_ = [("records", ctypes.c_char * 128), ("pages", ctypes.c_void_p), ("query", ctypes.c_void_p),
                ("output", ctypes.c_void_p), ("lse", ctypes.c_void_p), ("lengths", ctypes.c_void_p),
                ("tables", ctypes.c_void_p), ("partial", ctypes.c_void_p), ("partial_lse", ctypes.c_void_p),
                ("page_bytes", ctypes.c_uint64), ("rows", ctypes.c_int), ("heads", ctypes.c_int),
                ("page_tokens", ctypes.c_int), ("box", ctypes.c_int), ("table_stride", ctypes.c_int),
                ("span", ctypes.c_int), ("scale", ctypes.c_float), ("unused", ctypes.c_char * 28)]  # fmt: skip


def dense_decode_fp8(
    query: Tensor, cache: PagedRecords, scale: float, split: Split, workspace: Workspace, output: Tensor, lse: Tensor
) -> None:
    """Fill output bf16 [batch, tokens, heads, 512] and lse fp32 [batch, tokens, heads].

    Keys behind `split.span * split.most` are not read: no length may exceed it. Raises KernelError for operands the
    kernel does not take, before anything is launched.
    """
    check_operands(query, cache, output, lse)
    batch, tokens, heads = query.shape[:3]
    rows, pages = tokens * heads, cache.pages
    workspace.check(split, batch, rows)
    if not batch:
        return
    box = math.gcd(cache.page_tokens, TILE)
    parameters = _Parameters(
        b"", pages.data_ptr(), query.data_ptr(), output.data_ptr(), lse.data_ptr(), cache.lengths.data_ptr(),
        cache.tables.data_ptr(), workspace.partial.data_ptr(), workspace.lse.data_ptr(), pages.stride(0), rows, heads,
        cache.page_tokens, box, cache.tables.shape[1], split.span, scale * math.log2(math.e),
    )  # fmt: skip
    pairs = pages[:, : cache.page_tokens * RECORD].view(torch.bfloat16)
    pairs = pairs.as_strided((len(pages), cache.page_tokens, RECORD // 2), (pages.stride(0) // 2, RECORD // 2, 1))
    ctypes.memmove(ctypes.addressof(parameters), tensor_map(pairs, (1, box, 64)), 128)
    device = query.device.index
    _kernel("dense_decode_fp8", device).launch((-(-rows // ROWS_A_BLOCK), split.most, batch), parameters)
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
