"""Block-scaled products of `kernels/cuda/gemm_*.cu` run on a CPU: their headers are replaced, their source is not."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from kernels.testing.emulated import EmulatedKernel

_REPLACED = ("hopper.cuh", "gemm_products.cuh", "gemm_copies.cuh")


def emulate(source: Path, defines: Mapping[str, int], blocks: int, folder: Path) -> EmulatedKernel:
    """The kernel of `source` for a grid of `blocks`; `folder` takes what is built."""
    (folder / source.name).write_text(source.read_text())
    for name in _REPLACED:
        first = name == _REPLACED[0]
        (folder / name).write_text(f'#include "{Path(__file__).with_suffix(".cuh")}"\n' if first else "")
    return EmulatedKernel(folder / source.name, source.stem, {**defines, "GRID": blocks}, folder)


def tensor_map(tensor: Tensor, box: tuple[int, int, int]) -> bytes:
    """`driver.tensor_map` of a byte-wide tensor, for the emulated copies."""
    x, y, z = tensor.shape[2], tensor.shape[1], tensor.shape[0]
    words = (tensor.data_ptr(), x, y, z, tensor.stride(1), tensor.stride(0), box[2], box[1], box[0])
    return bytes((ctypes.c_uint64 * 16)(*words))
