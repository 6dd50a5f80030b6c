"""Engram's view of a decode step where the model is: classes, table rows and what they hold, without the host.

One row a sequence, none of them an image's or replayed; engine.families.v41.memory is for all others, and both keep
the same ring.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.checkpoint.table import RowTable, may_be_pinned
from engine.families.v41.hashing import NOTHING, EngramHash
from kernels import Ops
from kernels.csa2 import csa2_ops
from kernels.operands import Ragged, Ring
from kernels.staging import staged


class Recall:
    """Table rows of every sequence's newest token. Stateless: the ring is the cache's."""

    def __init__(self, classes: np.ndarray, hashing: EngramHash, tables: Sequence[RowTable], ops: Ops) -> None:
        """`tables` in the order of their layers. On a GPU they must be `fits`."""
        self._ops, self._csa2, self._pad = ops, csa2_ops(ops.name), hashing.pad
        self._classes, self._multipliers, self._primes, self._offsets = (
            torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(ops.device)
            for array in (classes, hashing.multipliers, hashing.primes, hashing.offsets)
        )
        self._tables = [table.for_device(ops.device) for table in tables]

    @staticmethod
    def fits(tables: Sequence[RowTable], device: torch.device) -> bool:
        """Whether the tables can be kept where `device` reads them."""
        return device.type == "cpu" or may_be_pinned(sum(table.nbytes for table in tables))

    def numbers(self, rows: Ragged, ring: Ring) -> torch.Tensor:
        """Table rows int64 [rows, layers, columns] of the newest tokens, whose classes go into the ring."""
        on, longest = staged(rows, self._ops.device), self._multipliers.shape[1]
        classes = self._classes[on.tokens]
        at = on.positions[:, None] - torch.arange(1, longest, device=self._ops.device)
        slots = on.slots[on.sequences].clamp_min(0)
        held = ring.storage[slots[:, None], ring.offset + at.clamp_min(0) % ring.capacity]
        recent = torch.cat([classes[:, None], torch.where(at < 0, NOTHING, held.to(torch.int64))], 1)
        self._ops.store_rows(classes.to(torch.float32)[:, None], 0, rows, ring)
        return self._csa2.hash_rows(recent, self._multipliers, self._primes, self._offsets, self._pad)

    def values(self, numbers: torch.Tensor, place: int) -> torch.Tensor:
        """What the rows of the table `place` hold: fp32 [rows, columns * width]."""
        table, wanted, gather = self._tables[place], numbers[:, place], self._csa2.gather
        if gather is not None and table.scale is not None and _is_grouped(table.weight, table.scale):
            return gather(wanted.contiguous(), table.weight, table.scale)
        return table.rows(wanted).flatten(1)


def _is_grouped(codes: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether rows are a power of two of E4M3 codes with a scale for 32 of them."""
    width = codes.shape[1]
    return codes.dtype == torch.float8_e4m3fn and scales.shape[1] * 32 == width and not width & (width - 1)
