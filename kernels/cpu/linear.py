"""Matrix products on the CPU: weights packed in panels of 16 columns, multiplied by the register tile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numba import prange

from kernels.cpu.compile import Array, parallel
from kernels.cpu.tile import LANES, WIDE, panels_product


@dataclass(frozen=True, slots=True)
class Panels:
    """`groups` matrices [out, in] as [groups * panels, in, 16]; fp32, or bf16 bits where that loses nothing.

    `rounds`: the compute type is bf16, so operands are rounded to it, sums are fp32.
    """

    array: Array
    groups: int
    columns: int  # outputs per group
    rounds: bool


def pack(weight: torch.Tensor, rounds: bool) -> Panels:
    """Panels of weight [groups, out, in]. Kept as bf16 where every value is one: half the bytes, the same products."""
    groups, columns, inner = weight.shape
    panels = -(-columns // LANES)
    padded = torch.zeros(groups, panels * LANES, inner, dtype=weight.dtype)
    padded[:, :columns] = weight
    tiled = padded.view(groups * panels, LANES, inner).transpose(1, 2).contiguous()
    narrow = tiled.to(torch.bfloat16)
    exact = rounds or bool((narrow.to(weight.dtype) == tiled).all())
    array = narrow.view(torch.uint16).numpy() if exact else tiled.to(torch.float32).numpy()
    return Panels(array, groups, columns, rounds)


def linear(x: torch.Tensor, weight: Panels) -> torch.Tensor:
    """x [rows, groups * in] times each group's matrix -> fp32 [rows, groups * out]."""
    out = torch.empty(x.shape[0], weight.groups * weight.columns)
    source = rounded(x) if weight.rounds else x
    product(source.numpy(), 0, weight.array, weight.groups, weight.columns, out.numpy())
    return out


def rounded(x: torch.Tensor) -> torch.Tensor:
    """fp32 rounded to bf16 values."""
    return x.to(torch.bfloat16).to(torch.float32)


@parallel
def product(x: Array, column: int, panels: Array, groups: int, columns: int, out: Array) -> None:
    """out [rows, groups * columns] from columns `column .. + groups * in` of x."""
    rows, inner, stride = x.shape[0], panels.shape[1], out.shape[1]
    per_group, size = panels.shape[0] // groups, inner * LANES
    tasks = (per_group + WIDE - 1) // WIDE
    for task in prange(groups * tasks):
        group, p = task // tasks, task % tasks * WIDE
        count, first = min(WIDE, per_group - p), p * LANES
        x_first, w_first, o_first = column + group * inner, (group * per_group + p) * size, group * columns + first
        if first + count * LANES <= columns:
            panels_product(
                x, x_first, x.shape[1], 1, rows, panels, w_first, LANES, size, count, inner, out, o_first, stride
            )
        else:
            wide, lanes = np.empty((rows, count * LANES), np.float32), count * LANES
            panels_product(x, x_first, x.shape[1], 1, rows, panels, w_first, LANES, size, count, inner, wide, 0, lanes)
            for row in range(rows):
                for c in range(columns - first):
                    out[row, o_first + c] = wide[row, c]
