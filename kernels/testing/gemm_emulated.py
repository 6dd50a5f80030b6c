"""Block-scaled products of `kernels/cuda/gemm_*.cu` run on a CPU: their headers are replaced, their source is not."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from kernels.testing.emulated import EmulatedKernel

_REPLACED = {
    "hopper.cuh": "gemm_emulated.cuh", "gemm_products.cuh": None, "gemm_copies.cuh": None,
    "gemm_large_products.cuh": None, "gemm_large_copies.cuh": "gemm_large_emulated.cuh",
}  # fmt: skip


def emulate(source: Path, defines: Mapping[str, int], blocks: int, folder: Path, cluster: int = 1) -> EmulatedKernel:
    """The kernel of `source` for a grid of `blocks`, `cluster` of them at a time; `folder` takes what is built."""
    for beside in (source, *source.parent.glob(f"{source.stem}_*.cuh")):
        (folder / beside.name).write_text(beside.read_text())
    for name, instead in _REPLACED.items():
        (folder / name).write_text(f'#include "{Path(__file__).parent / instead}"\n' if instead else "")
    return EmulatedKernel(folder / source.name, source.stem, {**defines, "GRID": blocks}, folder, cluster)


def tensor_map(tensor: Tensor, box: tuple[int, int, int]) -> bytes:
    """`driver.tensor_map` for the emulated copies, which count bytes."""
    width, (z, y, x) = tensor.element_size(), tensor.shape
    strides = (tensor.stride(1) * width, tensor.stride(0) * width)
    words = (tensor.data_ptr(), x * width, y, z, *strides, box[2] * width, box[1], box[0])
    return bytes((ctypes.c_uint64 * 16)(*words))
