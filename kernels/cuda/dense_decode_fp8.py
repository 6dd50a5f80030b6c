"""Dense MLA decode over FP8 records on Hopper: launches of `dense_decode_fp8.cu`. Formula: reference/dense_decode.py.

Queries are rounded to E4M3 with a scale for each row, so that scores are products in FP8; weights are bf16, and values
as exact as bf16 has them: outputs are within a few hundredths of the definition's.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from kernels.cuda.driver import tensor_map
from kernels.cuda.paged import Operands, PagedKernel, PagedParameters, TensorMap
from kernels.cuda.spans import Split, Workspace
from kernels.reference.dense_decode import PagedRecords
from kernels.reference.sparse_decode import RecordKind

RECORD = RecordKind.V32.value
SOURCE = Path(__file__).with_suffix(".cu")
# Queries, four tiles and weights in units of 64 rows of 128 bytes; scales of four tiles, folded scales, barriers and
# factors.
SHARED_BYTES = 27 * 8_192 + 4 * 1_024 + 1_024 + 1_168
COLUMNS = (16, 64)  # rows that a block sums values for


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
    box, pages = operands.box(), cache.pages
    pairs = pages[:, : cache.page_tokens * RECORD].view(torch.bfloat16)
    pairs = pairs.as_strided((len(pages), cache.page_tokens, RECORD // 2), (pages.stride(0) // 2, RECORD // 2, 1))
    records = TensorMap.from_buffer_copy(tensor_map(pairs, (1, box, 64)))
    parameters = _Parameters(operands.parameters(box), pages.data_ptr(), pages.stride(0), b"", records)
    kernel_of(COLUMNS[operands.rows > COLUMNS[0]]).launch(operands, parameters)


def kernel_of(columns: int) -> PagedKernel:
    """The kernel for so many rows of a sequence (16), or for any number (64)."""
    return PagedKernel(SOURCE, (("COLUMNS", columns),), 512, SHARED_BYTES)
