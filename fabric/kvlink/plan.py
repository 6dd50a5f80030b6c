"""Descriptor arithmetic on arrays: layout, bounds, coalescing. Knows no transport and loops over few copies alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fabric.errors import InvalidArgument
from fabric.kvlink.link import Offsets, Region, Token, Write
from fabric.records import Landing

# So many copies are looped over in the time of the array operations: those pay for cold caches, since a push runs where
# the payload of the last one has just filled them.
_FEW = 64


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """A checked write in as few copies as possible.

    `table` is int64 [3, n]: offset in `source`, offset in the region of `target`, bytes.
    """

    source: Region
    target: Token
    table: NDArray[np.int64]
    nbytes: int


def lay_out(sizes: Offsets) -> Offsets:
    """Offsets of extents packed without gaps, so that neighbours in the source stay neighbours. int64 [n]."""
    return np.concatenate(([0], np.cumsum(sizes[:-1]))).astype(np.int64) if len(sizes) else np.zeros(0, np.int64)


def write_to(landing: Landing, source: Region, source_offsets: Offsets, offsets: Offsets, sizes: Offsets) -> Write:
    """A write into a landing; `offsets` are relative to the landing's start.

    Raises:
        InvalidArgument: an extent leaves the landing.
    """
    if len(sizes) and (offsets.min() < 0 or (offsets + sizes).max() > landing.size):
        raise InvalidArgument(f"extents do not fit the landing of {landing.size} bytes", field="landing")
    return Write(source, source_offsets, landing.region, offsets + landing.offset, sizes)


def copies(write: Write) -> Copies:
    """What to do for a write: runs that are adjacent on both sides become one copy, none is split.

    Raises:
        InvalidArgument: a copy leaves either region, or the arrays do not match.
    """
    source, target, sizes = write.source, Token.unpack(write.target), write.sizes
    shape = sizes.shape
    if len(shape) != 1 or write.source_offsets.shape != shape or write.target_offsets.shape != shape:
        raise InvalidArgument("offset and size arrays must have one shape [n]", field="sizes")
    joined = _join_few if len(sizes) <= _FEW else _join_many
    table = joined(write, source.token.nbytes, target.nbytes)
    if table is None:
        check_bounds(write.source_offsets, sizes, source.token.nbytes, "source_offsets")
        check_bounds(write.target_offsets, sizes, target.nbytes, "target_offsets")
        raise InvalidArgument("a copy leaves its region", field="writes")
    return Copies(source, target, table, int(np.add.reduce(table[2])))


def check_bounds(offsets: Offsets, sizes: Offsets, limit: int, name: str) -> None:
    """Raises InvalidArgument where a copy is not inside [0, limit); `name` becomes the error's field."""
    # Compared without adding: a hostile offset near 2^63 must not wrap around.
    if ((offsets | sizes) < 0).any() or (offsets > limit - sizes).any():
        raise InvalidArgument(f"a copy leaves its region of {limit} bytes", field=name)


def _join_few(write: Write, source_bytes: int, target_bytes: int) -> NDArray[np.int64] | None:
    """`Copies.table`, or None where a copy is not inside both regions."""
    table: list[list[int]] = []
    source_end = target_end = -1
    columns = write.source_offsets.tolist(), write.target_offsets.tolist(), write.sizes.tolist()
    for source, target, size in zip(*columns, strict=True):
        neighbours = source == source_end and target == target_end
        source_end, target_end = source + size, target + size
        if source < 0 or target < 0 or size < 0 or source_end > source_bytes or target_end > target_bytes:
            return None
        if neighbours:
            table[-1][2] += size
        else:
            table.append([source, target, size])
    return np.array(table, np.int64).reshape(-1, 3).T


def _join_many(write: Write, source_bytes: int, target_bytes: int) -> NDArray[np.int64] | None:
    """As `_join_few`, without a loop."""
    table = np.empty((5, len(write.sizes)), np.int64)  # offsets on both sides, sizes, ends on both sides
    table[0], table[1], table[2] = write.source_offsets, write.target_offsets, write.sizes
    np.add(table[:2], table[2], out=table[3:])
    source_end, target_end = np.maximum.reduce(table[3:], axis=1).tolist()
    # A sum that wrapped around is negative.
    if np.minimum.reduce(table, axis=None) < 0 or source_end > source_bytes or target_end > target_bytes:
        return None
    neighbours = table[3:, :-1] == table[:2, 1:]
    joined = neighbours[0] & neighbours[1]
    if not np.logical_or.reduce(joined):
        return table[:3]
    starts = np.concatenate(([0], (~joined).nonzero()[0] + 1))
    small = table[:3, starts]
    small[2] = np.add.reduceat(table[2], starts)
    return small
