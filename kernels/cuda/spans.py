"""How keys are split over blocks of threads, and the room for what is to be summed afterwards. Launches nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.errors import KernelError

TILE, ROWS_A_BLOCK, COMBINE_THREADS = 64, 64, 128
INVARIANT_SPAN = 1024  # of `invariant_split`
_VALUE_WIDTH = 512
_START, _COMBINE, _PARTIAL = 3, 4, 3  # tiles: to begin and end a block, to launch `combine`, to write and read a span


@dataclass(frozen=True, slots=True)
class Split:
    """Keys of a sequence are taken in spans of `span` (a multiple of 64), at most `most` of them."""

    span: int
    most: int

    def __post_init__(self) -> None:
        if self.span < TILE or self.span % TILE or self.most < 1:
            raise KernelError(f"a split into {self.most} spans of {self.span}", fix="a span is a multiple of 64")


def fast_split(batch: int, rows: int, longest: int, processors: int) -> Split:
    """The split that takes least time for `batch` sequences of up to `longest` keys and `rows` rows (tokens * heads).

    Time is counted in tiles: a wave of blocks takes its longest span, some tiles to begin and to end, and a split its
    sums' way through memory.
    """
    tiles, blocks = max(1, -(-longest // TILE)), batch * -(-rows // ROWS_A_BLOCK)
    best, fewest = 1, math.inf
    for most in range(1, tiles + 1):
        waves = -(-blocks * most // processors)
        cost = waves * (-(-tiles // most) + _START) + (
            0 if most == 1 else _COMBINE + blocks * most / processors * _PARTIAL
        )
        if cost < fewest:
            best, fewest = most, cost
    span = -(-tiles // best)
    return Split(span * TILE, -(-tiles // span))


def invariant_split(longest: int) -> Split:
    """The split that is the same for every batch: a sequence has the same bits whatever it is decoded with."""
    return Split(INVARIANT_SPAN, max(1, -(-longest // INVARIANT_SPAN)))


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Sums of the spans: partial bf16 [most, batch, rows, 512] and lse fp32 [most, batch, rows]; empty for one span."""

    partial: Tensor
    lse: Tensor

    def check(self, split: Split, batch: int, rows: int) -> None:
        """Raises KernelError where a call's sums do not fit."""
        if split.most > 1 and self.lse.numel() < split.most * batch * rows:
            raise KernelError("the workspace is too small", fix="ask workspace_for with this split, batch and rows")


def workspace_for(split: Split, batch: int, rows: int, device: torch.device) -> Workspace:
    """Room for every call with this split and at most this batch and this many rows."""
    count = split.most * batch * rows if split.most > 1 else 0
    partial = torch.empty(count * _VALUE_WIDTH, dtype=torch.bfloat16, device=device)
    return Workspace(partial, torch.empty(count, device=device))
