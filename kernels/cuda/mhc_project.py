"""mHC's projection to 24 coefficients and sum of squares on a GPU: launches of `mhc_project.cu`; reference/mhc.py.

The fp32 weight is two bf16 ones, its rounding and what the rounding left (`pack`). Columns are cut into parts by their
number alone, so that a row's bits do not depend on the batch. One launch, no allocation: it captures into a CUDA graph.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from kernels.cuda import driver, tile_plan
from kernels.cuda.tile_plan import Plan, check_aligned
from kernels.reference.mhc import check_project, parts_of

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 288
_STEP, _HELD_BYTES = 64, 64 * 128  # columns of a box; bytes that it is held in
_WEIGHTS, _HEAD_BYTES, _ALIGNED, _FOUND_BYTES = 48, 512, 1024, 13 * 128 * 4 + 64 * 24 * 4
_BOXES, _STAGES = 2, 4
_TILES = (32, 64)  # rows


class _Map(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 16)]


class Parameters(ctypes.Structure):
    """Of the launch, as the source has them."""

    _fields_ = [("x", _Map), ("weight", _Map), ("z", ctypes.c_void_p),
                ("squares", ctypes.c_void_p), ("rows", ctypes.c_int), ("parts", ctypes.c_int)]  # fmt: skip


def project(x: Tensor, packed: Tensor, z: Tensor, squares: Tensor) -> None:
    """Fill z fp32 [parts, rows, 24] and squares fp32 [parts, rows] from x bf16 [rows, width] and `pack`'s weight.

    Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    check_project(x, packed, z, squares)
    rows, width = x.shape
    if rows:
        parts, processors = parts_of(width), tile_plan.multiprocessors(x.device)
        tile = tile_of(rows, parts, processors)
        parameters = parameters_of(x, packed, z, squares, tile)
        plan_for(width, tile).launch(blocks_of(rows, parts, processors), parameters, x.device)


def tile_of(rows: int, parts: int, processors: int) -> int:
    """Rows of a tile: the fewest with which every part's blocks have one at most, or the most there are."""
    groups = max(processors // parts, 1)
    return next((tile for tile in _TILES if rows <= tile * groups), _TILES[-1])


def blocks_of(rows: int, parts: int, processors: int) -> int:
    """Of a launch: as many for each part as run at a time, or as it has tiles."""
    return parts * min(max(processors // parts, 1), -(-rows // tile_of(rows, parts, processors)))


def plan_for(width: int, tile: int) -> Plan:
    """The launch for rows of `width` in tiles of `tile`."""
    steps = width // (_STEP * parts_of(width))
    defines = {"STEPS": steps, "TILE": tile, "BOXES": _BOXES, "STAGES": _STAGES}
    shared_bytes = _HEAD_BYTES + _ALIGNED + steps * _WEIGHTS * 128 + _STAGES * _BOXES * _HELD_BYTES + _FOUND_BYTES
    return Plan(SOURCE, defines, THREADS, shared_bytes)


def parameters_of(x: Tensor, packed: Tensor, z: Tensor, squares: Tensor, tile: int) -> Parameters:
    """Of a launch, with maps of its matrices. Raises KernelError where rows of x begin at odd addresses."""
    check_aligned(x=x, packed=packed, z=z)
    maps = (
        _Map.from_buffer_copy(driver.tensor_map(each.unsqueeze(0), (1, rows, _STEP)))
        for each, rows in ((x, tile), (packed, _WEIGHTS))
    )
    return Parameters(*maps, z.data_ptr(), squares.data_ptr(), x.shape[0], len(z))
