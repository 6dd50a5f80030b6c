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
from kernels.operands import Ragged, Ring
from kernels.staging import staged


class Recall:
    """Table rows of every sequence's newest token. Stateless: the ring is the cache's."""

    def __init__(self, classes: np.ndarray, hashing: EngramHash, tables: Sequence[RowTable], ops: Ops) -> None:
        """`tables` in the order of their layers. On a GPU they must be `fits`."""
        self._ops, self._heads, self._pad = ops, hashing.heads, hashing.pad
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
        return self._hashed(recent)

    def values(self, numbers: torch.Tensor, place: int) -> torch.Tensor:
        """What the rows of the table `place` hold: fp32 [rows, columns * width]."""
        return self._tables[place].rows(numbers[:, place]).flatten(1)

    def _hashed(self, recent: torch.Tensor) -> torch.Tensor:
        """As engine.families.v41.hashing.EngramHash.rows."""
        classes = torch.where((recent == NOTHING).cumsum(1) > 0, self._pad, recent)
        products = (classes[:, None, :] * self._multipliers).unbind(2)
        mixed, found = products[0], []
        for product in products[1:]:
            mixed = mixed ^ product
            found.append(mixed[..., None].expand(-1, -1, self._heads))
        return torch.cat(found, 2) % self._primes + self._offsets
