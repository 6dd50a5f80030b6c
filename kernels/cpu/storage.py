"""Arrays over stored records and row copies between them, fp32 or bf16. Knows no operator."""

from __future__ import annotations

import torch
from numba import prange

from kernels.cpu.compile import Array, parallel, serial
from kernels.cpu.numbers import narrow_into, widen
from kernels.operands import Ragged, Ring


def as_array(tensor: torch.Tensor) -> Array:
    """The tensor's memory as numpy; bf16 appears as uint16."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def store_rows(rows: torch.Tensor, column: int, ragged: Ragged, ring: Ring) -> None:
    """As reference.storage.store_rows."""
    _store(
        as_array(rows), column, ragged.starts, ragged.context, ragged.slots, ring.array, ring.offset, ring.capacity,
        ring.width,
    )  # fmt: skip


@serial
def copy_row(source: Array, row: int, column: int, width: int, target: Array, at: int) -> None:
    """target[at, :width] = source[row, column : column + width], widened to fp32."""
    for c in range(width):
        target[at, c] = widen(source[row, column + c])


@serial
def narrow_row(source: Array, row: int, target: Array, at: int, column: int) -> None:
    """target[at, column ..] = source[row], in the target's own format."""
    given, kept = source[row], target[at : at + 1, column : column + source.shape[1]]
    for c in range(len(given)):
        narrow_into(kept, 0, c, given[c])


@parallel
def _store(
    rows: Array, column: int, starts: Array, context: Array, slots: Array, ring: Array, offset: int, capacity: int,
    width: int,
) -> None:  # fmt: skip
    for s in prange(len(slots)):
        end = context[s] + starts[s + 1] - starts[s]
        for position in range(max(context[s], end - capacity), end):
            row, base = starts[s] + position - context[s], offset + position % capacity * width
            for c in range(width):
                narrow_into(ring, slots[s], base + c, widen(rows[row, column + c]))
