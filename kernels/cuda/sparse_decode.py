"""Sparse MLA decode on Hopper: launches of `sparse_decode.cu`. Shapes, formats and formula: reference/sparse_decode.py.

Nothing is allocated: it captures into a CUDA graph. A query's bits depend on that query and on the split alone.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from kernels.cuda.driver import Kernel, compile_cubin, load
from kernels.cuda.spans import COMBINE_THREADS, ROWS_A_BLOCK, TILE, Split, Workspace, fast_split
from kernels.errors import KernelError
from kernels.reference.sparse_decode import RecordKind, SparseCache, check_operands

THREADS = 512
WHOLE = Split(1 << 30, 1)
SOURCE = Path(__file__).with_suffix(".cu")
_CODES = {RecordKind.V4: 1, RecordKind.V32: 2, RecordKind.V41_WINDOW: 3, RecordKind.V41_ENTRY: 4}
PAIRS = ((RecordKind.V4, None), (RecordKind.V4, RecordKind.V4), (RecordKind.V32, None),
         (RecordKind.V41_WINDOW, None), (RecordKind.V41_WINDOW, RecordKind.V41_ENTRY))  # fmt: skip


class _Cache(ctypes.Structure):
    _fields_ = [("records", ctypes.c_void_p), ("indices", ctypes.c_void_p), ("lengths", ctypes.c_void_p),
                ("page_bytes", ctypes.c_uint64), ("page_tokens", ctypes.c_int), ("slots", ctypes.c_int),
                ("stride", ctypes.c_int), ("scales_at", ctypes.c_int)]  # fmt: skip


class _Parameters(ctypes.Structure):
    _fields_ = [("query", ctypes.c_void_p), ("output", ctypes.c_void_p), ("lse", ctypes.c_void_p),
                ("sink", ctypes.c_void_p), ("cache", _Cache * 2), ("partial", ctypes.c_void_p),
                ("partial_lse", ctypes.c_void_p), ("heads", ctypes.c_int), ("span", ctypes.c_int),
                ("scale", ctypes.c_float), ("unused", ctypes.c_int)]  # fmt: skip


def sparse_decode(
    query: Tensor, main: SparseCache, extra: SparseCache | None, sink: Tensor | None, scale: float,
    output: Tensor, lse: Tensor, split: Split = WHOLE, workspace: Workspace | None = None,
) -> None:  # fmt: skip
    """Fill output bf16 [queries, heads, 512] and lse fp32 [queries, heads].

    `split` counts the keys that `padded_keys` counts; with more than one span it needs a workspace. Raises KernelError
    for operands the kernel does not take, before anything is launched.
    """
    check_operands(query, main, extra, sink, output, lse)
    queries, heads = query.shape[:2]
    if split.most > 1 and (workspace is None or split.span * split.most < padded_keys(main, extra)):
        raise KernelError(f"{split} without room for its sums or for all keys", fix="ask split_for and workspace_for")
    if workspace is not None:
        workspace.check(split, queries, heads)
    if (main.kind, extra and extra.kind) not in PAIRS:
        raise KernelError(f"no kernel reads {main.kind} with {extra and extra.kind}", fix="use one of the pairs listed")
    room = (workspace.partial.data_ptr(), workspace.lse.data_ptr()) if workspace else (0, 0)
    parameters = _Parameters(
        query.data_ptr(), output.data_ptr(), lse.data_ptr(), 0 if sink is None else sink.data_ptr(),
        (_Cache * 2)(_cache(main), _cache(extra)), *room, heads, split.span // TILE, scale * math.log2(math.e), 0,
    )  # fmt: skip
    if not queries:
        return
    of = (main.kind, extra and extra.kind, int(split.most > 1), query.device.index)
    _kernel("sparse_decode", *of).launch((queries, -(-heads // ROWS_A_BLOCK), split.most), parameters)
    if split.most > 1:
        _kernel("combine", *of).launch_beside((heads, queries, 1), parameters)


def padded_keys(main: SparseCache, extra: SparseCache | None) -> int:
    """Most keys of a query, in whole tiles of each cache."""
    return sum(-(-cache.indices.shape[1] // TILE) * TILE for cache in (main, extra) if cache)


def split_for(queries: int, heads: int, keys: int, processors: int) -> Split:
    """The split for so many queries of `padded_keys`: one span where they fill the processors."""
    found = fast_split(queries, heads, keys, processors)
    return found if found.most > 1 else WHOLE


def defines_for(main: RecordKind, extra: RecordKind | None, split: int) -> dict[str, int]:
    """Macros the source is compiled with; `split`: 1 for more than one span."""
    return {"MAIN": _CODES[main], "EXTRA": _CODES[extra] if extra else 0, "WIDTH": main.width, "SPLIT": split}


def compile_for(main: RecordKind, extra: RecordKind | None, split: int) -> tuple[bytes, str]:
    """Machine code and the compiler's report; needs no GPU."""
    return compile_cubin(SOURCE, "sm_90a", defines_for(main, extra, split))


def shared_bytes(width: int) -> int:
    """Dynamic shared memory of a launch: queries, two tiles of keys, weights, state, and room to align."""
    return 64 * width * 2 * 3 + 64 * 64 * 2 + 96 + 8 * 64


@functools.cache
def _kernel(name: str, main: RecordKind, extra: RecordKind | None, split: int, device: int) -> Kernel:
    if torch.cuda.get_device_capability(device)[0] != 9:
        raise KernelError("this kernel is for Hopper (sm_90a)", fix="choose kernels=reference on this GPU")
    with torch.cuda.device(device):
        cubin = compile_for(main, extra, split)[0]
        if name == "combine":
            return load(cubin, name, COMBINE_THREADS, 0)
        return load(cubin, name, THREADS, shared_bytes(main.width))


def _cache(cache: SparseCache | None) -> _Cache:
    if cache is None:
        return _Cache()
    lengths = 0 if cache.lengths is None else cache.lengths.data_ptr()
    pages, apart = cache.pages, cache.scales
    scales_at = cache.page_tokens * 576 if apart is None else apart.data_ptr() - pages.data_ptr()
    return _Cache(pages.data_ptr(), cache.indices.data_ptr(), lengths, pages.stride(0), cache.page_tokens,
                  pages.shape[0] * cache.page_tokens, cache.indices.shape[1], scales_at)  # fmt: skip
