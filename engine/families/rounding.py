"""Cached values rounded to those a canonical record can hold, in place, and the indexer's queries with its keys.

The cache keeps its own type: only its values change, to the ones that packing a record and unpacking it would give.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from engine.cache.records import Record
from kernels import Ops
from kernels.csa2 import csa2_ops
from kernels.operands import IndexerSpec, Pages, Ragged, RopeTable, Selection


def rounded(values: torch.Tensor, record: Record) -> torch.Tensor:
    """values [..., record.width] as the record can hold them, in their own type."""
    return record.unpack(record.pack(values.to(torch.float32))).to(values.dtype)


def hadamard(width: int) -> torch.Tensor:
    """Sylvester's matrix of +1 and -1, fp32 [width, width]. ValueError unless `width` is a power of two."""
    if width < 1 or width & (width - 1):
        raise ValueError(f"{width} is not a power of two")
    matrix = torch.ones(1, 1)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def finished(rows: Ragged, rate: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequence and number of every entry of `rate` tokens that the batch completes."""
    if rate == 1:
        return rows.sequences, rows.positions
    return rows.windows[rate].sequence, rows.windows[rate].window


class Entries:
    """The entries that one batch has written to pages: read, and written again."""

    def __init__(self, rows: Ragged, pages: Pages) -> None:
        sequence, number = finished(rows, pages.rate)
        self._at = (
            torch.from_numpy(rows.tables[sequence, number // pages.entries]).long(),
            torch.from_numpy(number % pages.entries).long(),
        )
        held = pages.storage[:, pages.offset : pages.offset + pages.entries * pages.width]
        self._held: torch.Tensor = torch.unflatten(held, 1, (pages.entries, pages.width))

    def read(self) -> torch.Tensor:
        """[entries, width] in the pages' type."""
        return self._held[self._at]

    def write(self, values: torch.Tensor) -> None:
        """Put values [entries, width] in their place."""
        self._held[self._at] = values.to(self._held.dtype)


class IndexRounding:
    """The lightning indexer in a record's numbers: keys and query heads are mixed by Hadamard's matrix, then rounded.

    `order` says which channel of the published key each cached channel is (None: the same). The mixing is orthogonal,
    so that it changes no score by itself; it spreads large channels before few bits are left.
    """

    def __init__(self, ops: Ops, record: Record, order: list[int] | None = None) -> None:
        matrix = hadamard(record.width)
        self._ops, self._csa2, self._record = ops, csa2_ops(ops.name), record
        mixing = matrix if order is None else matrix[:, order].contiguous()
        self._mix = ops.pack(mixing[None].to(ops.device), False)

    def entries(self, rows: Ragged, pages: Pages) -> None:
        """Mix and round the keys that this batch has written."""
        written = Entries(rows, pages)
        written.write(self._mixed(written.read().to(torch.float32)))

    def choose(
        self, queries: torch.Tensor, projected: torch.Tensor, spec: IndexerSpec, rows: Ragged, pages: Pages,
        rope: RopeTable,
    ) -> Selection:  # fmt: skip
        """As `Ops.index_topk`, with rounded query heads."""
        width, heads = spec.width, queries[:, spec.query_column :][:, : spec.heads * spec.width].contiguous()
        turned = self._csa2.rotate_heads(heads, width, rows.positions, rope)
        mixed = self._mixed(turned.view(-1, width)).view(len(queries), -1)
        still = RopeTable(torch.ones_like(rope.cos), torch.zeros_like(rope.sin))  # they are rotated already
        return self._ops.index_topk(mixed, projected, replace(spec, query_column=0), rows, pages, still)

    def _mixed(self, values: torch.Tensor) -> torch.Tensor:
        return rounded(self._ops.linear(values, self._mix) * self._record.width**-0.5, self._record)
