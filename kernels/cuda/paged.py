"""Launches over keys in pages, split into spans: what dense decode's kernels are given alike. Knows no format of keys.

Keys are split into spans of a fixed length, so that the bits of a sequence depend on it and on the span alone; of a
sequence for which these are too few, into longer ones. Nothing is allocated while running: it captures into a CUDA
graph.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.cuda.driver import Kernel, compile_cubin, load
from kernels.cuda.spans import COMBINE_THREADS, ROWS_A_BLOCK, TILE, Split, Workspace
from kernels.errors import KernelError
from kernels.reference.dense_decode import PagedLatents, PagedRecords, check_operands

TensorMap = ctypes.c_uint64 * 16  # what `tensor_map` describes


class PagedParameters(ctypes.Structure):
    """`Paged` of paged.cuh."""

    _fields_ = [("query", ctypes.c_void_p), ("output", ctypes.c_void_p), ("lse", ctypes.c_void_p),
                ("lengths", ctypes.c_void_p), ("tables", ctypes.c_void_p), ("partial", ctypes.c_void_p),
                ("partial_lse", ctypes.c_void_p), ("rows", ctypes.c_int), ("heads", ctypes.c_int),
                ("page_tokens", ctypes.c_int), ("box", ctypes.c_int), ("table_stride", ctypes.c_int),
                ("span", ctypes.c_int), ("most", ctypes.c_int), ("scale", ctypes.c_float)]  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """Of one call; checked by `check`."""

    query: Tensor
    cache: PagedLatents | PagedRecords
    scale: float
    split: Split
    workspace: Workspace
    output: Tensor
    lse: Tensor

    @property
    def rows(self) -> int:
        """Query tokens times heads."""
        return int(self.query.shape[1] * self.query.shape[2])

    @property
    def blocks(self) -> int:
        """Blocks of threads that a span of a sequence wants."""
        return -(-self.rows // ROWS_A_BLOCK)

    def check(self) -> None:
        """Raises KernelError for operands no kernel takes."""
        check_operands(self.query, self.cache, self.output, self.lse)
        self.workspace.check(self.split, len(self.query), self.rows)

    def box(self, most: int = TILE) -> int:
        """Tokens of a page that one copy takes, at most `most`."""
        return min(math.gcd(self.cache.page_tokens, TILE), most)

    def parameters(self, box: int) -> PagedParameters:
        """What a kernel is given."""
        cache, room = self.cache, self.workspace
        return PagedParameters(
            self.query.data_ptr(), self.output.data_ptr(), self.lse.data_ptr(), cache.lengths.data_ptr(),
            cache.tables.data_ptr(), room.partial.data_ptr(), room.lse.data_ptr(), self.rows, self.query.shape[2],
            cache.page_tokens, box, cache.tables.shape[1], self.split.span, self.split.most,
            self.scale * math.log2(math.e),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PagedKernel:
    """A source with a kernel of its own name and `combine`, compiled with `defines`."""

    source: Path
    defines: tuple[tuple[str, int], ...]
    threads: int
    shared_bytes: int

    def compile(self) -> tuple[bytes, str]:
        """Machine code and the compiler's report; needs no GPU."""
        return compile_cubin(self.source, "sm_90a", dict(self.defines))

    def launch(self, operands: Operands, parameters: ctypes.Structure) -> None:
        """Attends, and sums what was split; raises KernelError where the GPU is none of Hopper's."""
        batch, device = len(operands.query), operands.query.device.index
        _load(self, self.source.stem, device).launch((operands.blocks, operands.split.most, batch), parameters)
        if operands.split.most > 1:
            _load(self, "combine", device).launch_beside((operands.rows, batch, 1), parameters)


@functools.cache
def _load(kernel: PagedKernel, name: str, device: int) -> Kernel:
    if torch.cuda.get_device_capability(device)[0] != 9:
        raise KernelError("this kernel is for Hopper (sm_90a)", fix="choose kernels=reference on this GPU")
    with torch.cuda.device(device):
        cubin = kernel.compile()[0]
        if name == "combine":
            return load(cubin, name, COMBINE_THREADS, 0)
        return load(cubin, name, kernel.threads, kernel.shared_bytes)
