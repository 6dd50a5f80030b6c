"""Rows of a device's storage in the host's memory, pinned: copied whole, in either direction. Knows no layout."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from engine.errors import InvalidParameter

# Zeroed host memory of so many bytes, uint8 [n], of a kind that its maker knows a use for.
Allocate = Callable[[int], np.ndarray]


class HostCopy:
    """`rows` is uint8 of the shape of `device_rows` [rows, width]. A row is what was copied into it last.

    Rows that are being copied must have no other writer; who copies what when is its owner's business.
    """

    def __init__(self, device_rows: torch.Tensor, allocate: Allocate) -> None:
        """Raises InvalidParameter where CUDA does not pin so much memory."""
        count, width = device_rows.shape
        self._device_rows = device_rows
        self.rows: np.ndarray = (allocate(count * width) if count * width else np.empty(0, np.uint8)).reshape(
            count, width
        )
        self._host_rows = torch.from_numpy(self.rows)
        if device_rows.is_cuda and count * width:
            _pin(self._host_rows)
            weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, self._host_rows.data_ptr())

    def fetch(self, rows: Iterable[int]) -> None:
        """The device's rows into the host's, in the device's order; returns when they are there."""
        self._copy(self._host_rows, self._device_rows, rows)

    def upload(self, rows: Iterable[int]) -> None:
        """The host's rows into the device's, in the device's order; returns when they are there."""
        self._copy(self._device_rows, self._host_rows, rows)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, rows: Iterable[int]) -> None:
        for first, last in _runs(rows):
            target[first:last].copy_(source[first:last], non_blocking=True)
        if self._device_rows.is_cuda:
            torch.cuda.current_stream(self._device_rows.device).synchronize()


def _runs(rows: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Adjacent rows as one range each: the first, and the one behind the last."""
    ordered = sorted(set(rows))
    first = 0
    for number in range(1, len(ordered) + 1):
        if number == len(ordered) or ordered[number] != ordered[number - 1] + 1:
            yield ordered[first], ordered[number - 1] + 1
            first = number


def _pin(memory: torch.Tensor) -> None:
    """Copies of pinned memory run at the bus's rate, and beside other work."""
    size = memory.numel()
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)
    if int(code) != 0:
        problem = f"CUDA does not pin {size} bytes of host memory for the KV on its way (error {int(code)})"
        raise InvalidParameter("memory_bytes", problem, "lower it, or give the process more memory to lock")
