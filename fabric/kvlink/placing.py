"""Where the extents of a chunk go, and whether they may be looked at. Knows no transfer and copies nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fabric.errors import InvalidArgument
from fabric.kvlink.extents import Extents
from fabric.kvlink.messages import Chunk
from fabric.kvlink.verify import KERNEL_BYTES, CopyRows, Destination

# (group, block, size) -> where an extent's bytes go. Raises InvalidArgument for one nobody asked for.
Place = Callable[[str, int, int], Destination]
# As `Place` of many extents at once: addresses uint64 [n] of live memory that stays; None where each must be asked for.
PlaceAll = Callable[[Extents], NDArray[np.uint64] | None]

# So many extents are looked at one by one in the time of the array operations, whose code and data are cold by then.
_FEW = 16


def rows_of(extents: Extents, place: Place, place_all: PlaceAll | None) -> CopyRows:
    """What to copy, by offset where the extents lie: one table where `place_all` can tell. Raises what those two do."""
    table = extents.table
    if place_all is not None and len(table) > _FEW and int(table["size"].min()) >= KERNEL_BYTES:
        addresses = place_all(extents)
        if addresses is not None:
            return np.stack([table["offset"], table["size"], table["digest"], addresses], axis=1)
    return [(offset, size, seal, place(group, block, size)) for group, block, _, offset, size, seal in extents.rows()]


def check_chunk(chunk: Chunk, ring_bytes: int, lent_bytes: int = 0, ahead_bytes: int = 0) -> None:
    """Raises InvalidArgument where an extent is not in its chunk: it could be one that is still being written; and for
    more of them than fit, which would take more time to copy than a landing has bytes. Extents that are lent may lie
    anywhere in the `lent_bytes` bytes of their memory; of those announced ahead there are `ahead_bytes` at most."""
    run, table = chunk.run, chunk.extents.table
    most_bytes = ahead_bytes if chunk.ahead else run.size
    if not (0 <= run.size <= ring_bytes and 0 <= run.offset <= ring_bytes):
        raise InvalidArgument(f"chunk {chunk.number} does not fit its landing of {ring_bytes} bytes", field="chunk")
    floor, end = (0, lent_bytes) if chunk.lent else (run.offset, run.offset + run.size)
    if len(table) <= _FEW:
        _check_few(chunk, floor, end, most_bytes)
        return
    offsets, sizes, most = table["offset"].copy(), table["size"].copy(), min(most_bytes, end - floor)
    inside = (sizes >= 1) & (sizes <= most) & (offsets >= floor)
    # Compared without adding: a hostile offset near 2^64 must not wrap around.
    if not (inside & (offsets <= end - np.minimum(sizes, most))).all():
        raise InvalidArgument(f"an extent is not in its chunk {chunk.number}", field="extents")
    if int(sizes.sum()) > most_bytes:
        raise InvalidArgument(f"extents of chunk {chunk.number} overlap", field="extents")


def _check_few(chunk: Chunk, floor: int, end: int, most_bytes: int) -> None:
    total = 0
    for _, _, _, offset, size, _ in chunk.extents.table.tolist():
        total += size
        if size < 1 or offset < floor or offset + size > end:
            raise InvalidArgument(f"an extent is not in its chunk {chunk.number}", field="extents")
    if total > most_bytes:
        raise InvalidArgument(f"extents of chunk {chunk.number} overlap", field="extents")
