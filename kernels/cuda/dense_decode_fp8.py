"""Dense MLA decode over FP8 records on Hopper: launches of `dense_decode_fp8*.cu`. Formula: reference/dense_decode.py.

Scores are products in FP8; weights are bf16, and values as exact as bf16 has them. Up to 16 rows of a sequence, queries
are the sum of two E4M3 and outputs as exact as those over bf16 latents; else they are rounded to one E4M3 with a scale
for each row, and outputs are within a few hundredths of the definition's.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from kernels.cuda.dense_decode import cluster_of
from kernels.cuda.driver import tensor_map
from kernels.cuda.paged import Operands, PagedKernel, PagedParameters, TensorMap
from kernels.cuda.spans import TILE, Split, Workspace
from kernels.reference.dense_decode import PagedRecords
from kernels.reference.sparse_decode import RecordKind

RECORD = RecordKind.V32.value
COLUMNS = (16, 64)  # rows that a block sums values for
SHARED_SPAN = 32 * TILE  # from here on it pays that two blocks share what they read: a cluster begins later
_FOLDER = Path(__file__).parent
_THREADS = {16: 384, 64: 512}
_CHUNK, _RECORDS = 64 * 128, 64 * RECORD  # bytes of 64 rows of 128 bytes, and of 64 records
# Of up to 16 rows: queries and weights, four tiles, numbers by row. Of 64: queries, four tiles and weights; four tiles'
# scales, folded and not; numbers by row.
_SHARED = {16: 34 * 1_024 + 4 * _RECORDS + 1_376, 64: 27 * _CHUNK + 4 * (512 + 1_280) + 1_152}


class _Parameters(ctypes.Structure):
    _fields_ = [("paged", PagedParameters), ("pages", ctypes.c_void_p), ("page_bytes", ctypes.c_uint64),
                ("before", ctypes.c_char * 24), ("records", TensorMap)]  # fmt: skip


def dense_decode_fp8(
    query: Tensor, cache: PagedRecords, scale: float, split: Split, workspace: Workspace, output: Tensor, lse: Tensor
) -> None:
    """Fill output bf16 [batch, tokens, heads, 512] and lse fp32 [batch, tokens, heads].

    A sequence of more than `split.span * split.most` keys is cut into `split.most` equal spans. Raises KernelError for
    operands the kernel does not take, before anything is launched.
    """
    operands = Operands(query, cache, scale, split, workspace, output, lse)
    operands.check()
    if not len(query):
        return
    cluster = cluster_of(operands.blocks) if operands.rows > COLUMNS[0] and split.span >= SHARED_SPAN else 1
    box, pages = operands.box(TILE // cluster), cache.pages
    pairs = pages[:, : cache.page_tokens * RECORD].view(torch.bfloat16)
    pairs = pairs.as_strided((len(pages), cache.page_tokens, RECORD // 2), (pages.stride(0) // 2, RECORD // 2, 1))
    records = TensorMap.from_buffer_copy(tensor_map(pairs, (1, box, 64)))
    parameters = _Parameters(operands.parameters(box), pages.data_ptr(), pages.stride(0), b"", records)
    kernel_of(COLUMNS[operands.rows > COLUMNS[0]], cluster).launch(operands, parameters)


def kernel_of(columns: int, cluster: int = 1) -> PagedKernel:
    """The kernel for so many rows of a sequence (16), or for any number (64), in clusters of so many blocks."""
    if columns == COLUMNS[0]:
        return PagedKernel(_FOLDER / "dense_decode_fp8_few.cu", (), _THREADS[columns], _SHARED[columns])
    return PagedKernel(_FOLDER / "dense_decode_fp8.cu", (("CLUSTER", cluster),), _THREADS[columns], _SHARED[columns])
