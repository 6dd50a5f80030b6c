"""Extents of many blocks as one table: what a chunk says of its bytes. Knows numbers and group names, no memory.

An object for every extent takes as long as copying 8 KB; tables are cut, checked and packed whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Group, block, valid entries, offset in the landing, bytes, digest.
Row = tuple[str, int, int, int, int, int]
ROW = np.dtype(
    [
        ("group", "<u4"),
        ("block", "<u4"),
        ("valid_entries", "<u4"),
        ("offset", "<u8"),
        ("size", "<u8"),
        ("digest", "<u8"),
    ]
)
Table = NDArray[np.void]


@dataclass(frozen=True, slots=True, eq=False)
class Extents:
    """`table` is ROW [n]; its "group" counts in `groups`. Not to be changed by who did not make it."""

    groups: tuple[str, ...]
    table: Table

    @staticmethod
    def of(rows: Sequence[Row]) -> Extents:
        index: dict[str, int] = {}
        numbered = [(index.setdefault(group, len(index)), *rest) for group, *rest in rows]
        return Extents(tuple(index), np.array(numbered, ROW))

    def rows(self) -> tuple[Row, ...]:
        return tuple([(self.groups[group], *rest) for group, *rest in self.table.tolist()])

    def name(self, index: int) -> str:
        """The extent as errors call it."""
        return f"group {self.groups[self.table['group'][index]]} block {self.table['block'][index]}"

    def sealed(self) -> dict[tuple[str, int], tuple[int, int, int]]:
        """(valid entries, size, digest) by (group, block); the last of several counts."""
        columns = [self.table[name].tolist() for name in ("block", "valid_entries", "size", "digest")]
        names = [self.groups[group] for group in self.table["group"].tolist()]
        return dict(zip(zip(names, columns[0], strict=True), zip(*columns[1:], strict=True), strict=True))

    def __len__(self) -> int:
        return len(self.table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Extents) and self.rows() == other.rows()

    __hash__ = None  # type: ignore[assignment]
