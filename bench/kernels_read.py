"""What only reading a tensor takes, from a cold L2: the floor under every kernel that has to. Knows no operator."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from bench.kernels_timing import median_us
from kernels.cuda.tile_plan import Plan, multiprocessors

SOURCE = Path(__file__).with_name("read.cu")
_UNIT_BYTES = 16
# Threads of a block, loads of a thread on their way, whether what is read leaves the L2 first; blocks that stay on a
# multiprocessor, or None for as many as one turn takes.
_WAYS = ((256, 8, 0, 8), (256, 8, 1, 8), (256, 4, 0, None), (256, 4, 1, None), (512, 4, 0, 1))


class _Parameters(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("count", ctypes.c_ulonglong), ("never", ctypes.c_void_p)]


def sources() -> list[tuple[Path, str, dict[str, int]]]:
    """What is to be compiled."""
    return [(SOURCE, "sm_90a", dict(_plan(*way[:3]).defines)) for way in _WAYS]


def reading_us(tensor: Tensor) -> float:
    """Median microseconds in which a contiguous CUDA tensor is read and nothing kept: the least of several ways."""
    never = torch.zeros(1, dtype=torch.int32, device=tensor.device)
    count = tensor.numel() * tensor.element_size() // _UNIT_BYTES
    parameters = _Parameters(tensor.data_ptr(), count, never.data_ptr())
    found = []
    for threads, unroll, leaving, stay in _WAYS:
        kernel, turn = _plan(threads, unroll, leaving).kernel(tensor.device), -(-count // (threads * unroll))
        blocks = turn if stay is None else min(stay * multiprocessors(tensor.device), turn)
        found.append(median_us(lambda k=kernel, b=blocks: k.launch((b, 1, 1), parameters)))
    return min(found)


def _plan(threads: int, unroll: int, leaving: int) -> Plan:
    return Plan(SOURCE, {"THREADS": threads, "UNROLL": unroll, "LEAVING": leaving}, threads)
