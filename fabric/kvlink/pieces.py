"""What a sender has to send: extents as they lie in its regions, sealed. Knows tables and regions, sends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fabric.kvlink.credit import cut
from fabric.kvlink.extents import Extents
from fabric.kvlink.link import Offsets, Region, Write
from fabric.kvlink.plan import write_to
from fabric.records import Landing

_MOST_LENT = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One extent as it lies in this process: `size` bytes from `start` of `source`, sealed with their digest.

    The bytes must stay as they are until the `send` that takes them has returned: their receiver may read them there.
    """

    group: str
    block: int
    valid_entries: int
    source: Region
    start: int
    size: int
    digest: int


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Many pieces in order, as arrays: piece i is `extents.table[i]`, at `starts[i]` of `regions[of[i]]`, int64 [n]."""

    extents: Extents
    regions: tuple[Region, ...]
    of: Offsets
    starts: Offsets

    @staticmethod
    def pack(pieces: Sequence[Piece]) -> Pieces:
        numbers: dict[int, int] = {}
        rows = [(p.group, p.block, p.valid_entries, 0, p.size, p.digest) for p in pieces]
        of = [numbers.setdefault(id(p.source), len(numbers)) for p in pieces]
        regions = {id(p.source): p.source for p in pieces}
        starts = np.array([p.start for p in pieces], np.int64)
        return Pieces(Extents.of(rows), tuple(regions[key] for key in numbers), np.array(of, np.int64), starts)

    def cut(self, first: int, end: int) -> Pieces:
        table = self.extents.table[first:end].copy()
        if len(table) == len(self):
            return Pieces(Extents(self.extents.groups, table), self.regions, self.of, self.starts)
        return Pieces(Extents(self.extents.groups, table), self.regions, self.of[first:end], self.starts[first:end])

    def spans(self, chunk_bytes: int, apart: bool) -> list[tuple[int, int]]:
        """Chunks [first, end) in order, each of `chunk_bytes` bytes at most or of one piece; `apart`: of one region and
        about as many pieces as one datagram can name."""
        mixed = apart and len(self.regions) > 1
        if apart and len(self) > _MOST_LENT:
            chunk_bytes = max(1, min(chunk_bytes, self.nbytes // len(self) * _MOST_LENT))
        if len(self) and not mixed and self.nbytes <= chunk_bytes:
            return [(0, len(self))]
        sizes = self.sizes
        borders = ((self.of[1:] != self.of[:-1]).nonzero()[0] + 1).tolist() if mixed else []
        found = []
        for first, end in pairwise([0, *borders, len(self)]):
            found += [(first + start, first + stop) for start, stop in cut(sizes[first:end], chunk_bytes)]
        return found

    @property
    def sizes(self) -> Offsets:
        """Bytes of each, int64 [n]."""
        return self.extents.table["size"].astype(np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return int(self.extents.table["size"].sum())

    def __len__(self) -> int:
        return len(self.starts)


NOTHING = Pieces.pack(())


def writes(landing: Landing, pieces: Pieces, offsets: Offsets, sizes: Offsets) -> list[Write]:
    """One write for every source region, its pieces in order."""
    if len(pieces.regions) == 1:
        return [write_to(landing, pieces.regions[0], pieces.starts, offsets, sizes)]
    found = []
    for number, region in enumerate(pieces.regions):
        own = pieces.of == number
        if own.any():
            found.append(write_to(landing, region, pieces.starts[own], offsets[own], sizes[own]))
    return found
