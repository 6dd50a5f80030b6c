"""Tile kernels in CUDA C++, run on a CPU through the functions that launch them; their headers are replaced."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from torch import Tensor

from kernels.cuda import driver, tile_plan
from kernels.cuda.tile_plan import Plan
from kernels.testing.emulated import EmulatedKernel

_REPLACED = ("stream.cuh", "mhc_products.cuh")
_KEPT = ("scales.cuh", "codes.cuh")


class _Emulated:
    """Instead of a loaded kernel; built for each number of blocks, which the source is compiled with."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self._built: dict[int, EmulatedKernel] = {}

    def launch(self, grid: tuple[int, int, int], parameters: ctypes.Structure) -> None:
        if grid[0] not in self._built:
            self._built[grid[0]] = self._build(grid[0])
        self._built[grid[0]].launch(grid[0], self._plan.threads, parameters)

    def _build(self, blocks: int) -> EmulatedKernel:
        defines = {**self._plan.defines, "GRID": blocks}
        name = "-".join(f"{key}{value}" for key, value in sorted(defines.items()))
        folder = self._folder / f"{self._plan.source.stem}-{name}"
        folder.mkdir(exist_ok=True)
        source = folder / self._plan.source.name
        source.write_text(self._plan.source.read_text())
        for kept in _KEPT:
            (folder / kept).write_text((self._plan.source.parent / kept).read_text())
        first, rest = _REPLACED
        (folder / first).write_text(f'#pragma once\n#include "{Path(__file__).with_suffix(".cuh")}"\n')
        (folder / rest).write_text("")
        return EmulatedKernel(source, source.stem, defines, folder)


def emulate(monkeypatch: pytest.MonkeyPatch, folder: Path, processors: int = 3) -> None:
    """From here on launches of plans run here, as on a GPU of so many multiprocessors; `folder` takes what is built."""
    built: dict[str, _Emulated] = {}
    monkeypatch.setattr(Plan, "kernel", lambda plan, _: built.setdefault(repr(plan), _Emulated(plan, folder)))
    monkeypatch.setattr(tile_plan, "multiprocessors", lambda _: processors)
    monkeypatch.setattr(driver, "tensor_map", _tensor_map)


def _tensor_map(tensor: Tensor, box: tuple[int, int, int]) -> bytes:
    """`driver.tensor_map` for the emulated copies, in bytes."""
    size = tensor.element_size()
    places = [each * size for each in (tensor.shape[2], tensor.stride(1), tensor.stride(0), box[2])]
    words = (tensor.data_ptr(), places[0], tensor.shape[1], tensor.shape[0], *places[1:], box[1], box[0])
    return bytes((ctypes.c_uint64 * 16)(*words))
