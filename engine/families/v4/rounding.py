"""V4's cached values as its training rounded them: FP8 rows and entries, FP4 index keys. Owns no cache."""

from __future__ import annotations

import torch

from engine.families.rounding import Entries, IndexRounding, rounded
from engine.families.v4.config import V4Config
from engine.families.v4.records import index_fp4, row_fp8
from kernels import Ops
from kernels.operands import Pages, Ragged


class Rounding:
    """Rounds window rows, compressed entries and (in `index`) the indexer's keys and queries."""

    def __init__(self, config: V4Config, ops: Ops) -> None:
        self._record = row_fp8(config.head_dim, config.rope_dim)
        self.index = IndexRounding(ops, index_fp4(config.index_dim))

    def rows(self, keys: torch.Tensor) -> torch.Tensor:
        """Window rows [rows, head_dim], in their own type."""
        return rounded(keys, self._record)

    def entries(self, rows: Ragged, pages: Pages) -> None:
        """The compressed entries that this batch has written."""
        written = Entries(rows, pages)
        written.write(rounded(written.read(), self._record))
