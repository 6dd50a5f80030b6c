"""Dense MLA decode on Hopper: launches of `dense_decode.cu`. Shapes and formula: reference/dense_decode.py."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from kernels.cuda.driver import tensor_map
from kernels.cuda.paged import Operands, PagedKernel, PagedParameters, TensorMap
from kernels.cuda.spans import TILE, Split, Workspace
from kernels.reference.dense_decode import PagedLatents

SOURCE = Path(__file__).with_suffix(".cu")
# In 64 rows of 64 channels: five of queries, 22 of tiles, weights; barriers, factors by row twice.
SHARED_BYTES = 64 * 64 * 2 * (5 + 22 + 1) + 30 * 8 + 2 * 64 * 4


class _Parameters(ctypes.Structure):
    _fields_ = [("paged", PagedParameters), ("before", ctypes.c_char * 40), ("keys", TensorMap)]


def dense_decode(
    query: Tensor, cache: PagedLatents, scale: float, split: Split, workspace: Workspace, output: Tensor, lse: Tensor
) -> None:
    """Fill output bf16 [batch, tokens, heads, 512] and lse fp32 [batch, tokens, heads].

    A sequence of more than `split.span * split.most` keys is cut into `split.most` equal spans. Raises KernelError for
    operands the kernel does not take, before anything is launched.
    """
    operands = Operands(query, cache, scale, split, workspace, output, lse)
    operands.check()
    if not len(query):
        return
    cluster = cluster_of(operands.blocks)
    box = operands.box(TILE // cluster)
    keys = TensorMap.from_buffer_copy(tensor_map(cache.pages, (1, box, 64)))
    kernel_of(cluster).launch(operands, _Parameters(operands.parameters(box), b"", keys))


def cluster_of(blocks: int) -> int:
    """How many of the `blocks` of a sequence share what they read."""
    return 1 if blocks % 2 else 2


def kernel_of(cluster: int) -> PagedKernel:
    """The kernel whose clusters are of so many blocks."""
    return PagedKernel(SOURCE, (("CLUSTER", cluster),), 384, SHARED_BYTES)
