"""Descriptor arithmetic on arrays: layout, bounds, coalescing. Knows no transport and loops over nothing."""

from __future__ import annotations

import numpy as np

from fabric.errors import InvalidArgument
from fabric.kvlink.link import Offsets, Region, Token, Write
from fabric.records import Landing


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


def check(write: Write) -> Token:
    """The target's token. Raises InvalidArgument where a copy leaves either region or the arrays do not match."""
    token = Token.unpack(write.target)
    shape = write.sizes.shape
    if len(shape) != 1 or write.source_offsets.shape != shape or write.target_offsets.shape != shape:
        raise InvalidArgument("offset and size arrays must have one shape [n]", field="sizes")
    check_bounds(write.source_offsets, write.sizes, write.source.token.nbytes, "source_offsets")
    check_bounds(write.target_offsets, write.sizes, token.nbytes, "target_offsets")
    return token


def coalesce(write: Write) -> Write:
    """The same bytes in as few copies as possible: runs that are adjacent on both sides become one; none is split."""
    count = len(write.sizes)
    if count < 2:
        return write
    # Two neighbours join where both distances equal the first one's size.
    sizes, source, target = write.sizes[:-1], write.source_offsets, write.target_offsets
    breaks = ((source[1:] - source[:-1] != sizes) | (target[1:] - target[:-1] != sizes)).nonzero()[0] + 1
    if len(breaks) == count - 1:
        return write
    starts = np.concatenate(([0], breaks))
    return Write(
        write.source,
        write.source_offsets[starts],
        write.target,
        write.target_offsets[starts],
        np.add.reduceat(write.sizes, starts),
    )


def check_bounds(offsets: Offsets, sizes: Offsets, limit: int, name: str) -> None:
    """Raises InvalidArgument where a copy is not inside [0, limit); `name` becomes the error's field."""
    # Compared without adding: a hostile offset near 2^63 must not wrap around.
    if ((offsets | sizes) < 0).any() or (offsets > limit - sizes).any():
        raise InvalidArgument(f"a copy leaves its region of {limit} bytes", field=name)
