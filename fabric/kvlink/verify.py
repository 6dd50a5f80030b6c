"""Digests of canonical bytes, and copies that are checked where they arrive. Knows xxh3-64 and nothing of slabs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from fabric.errors import DataLoss, InvalidArgument
from fabric.kvlink.link import Bytes
from fabric.records import Extent

DIGEST_KIND = "xxh3-64"
# A piece that stays in the processor's second-level cache between the copy and the hash.
_PIECE_BYTES = 128 << 10


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """One extent of a receipt and the live memory (uint8 [extent.size]) it goes to."""

    extent: Extent
    destination: Bytes


def digest(memory: Bytes) -> int:
    """xxh3-64 of contiguous bytes; releases the interpreter."""
    return xxhash.xxh3_64_intdigest(memory.data)


def check_placements(placements: Sequence[Placement], landing_bytes: int) -> None:
    """Raises InvalidArgument, before any copy, where an extent leaves the landing or does not match its destination."""
    for placement in placements:
        extent, destination = placement.extent, placement.destination
        if extent.offset < 0 or extent.size <= 0 or extent.end > landing_bytes:
            raise InvalidArgument(f"{_name(extent)} leaves its landing of {landing_bytes} bytes", field="extents")
        if destination.dtype != np.uint8 or destination.shape != (extent.size,) or not destination.flags.c_contiguous:
            raise InvalidArgument(f"{_name(extent)} does not match its destination", field="extents")


def copy_verified(landing: Bytes, placements: Sequence[Placement]) -> None:
    """Copies every extent to its destination and checks the digest of what arrived there.

    The destination is what is hashed: a writer that changes the landing during the copy is caught as well. Piece by
    piece, so that the hash reads what the copy left in the processor's cache. Pieces are copied by memoryview, which
    keeps the interpreter for the microseconds of one piece; a large array copy would give it up and wait for it again.

    Raises:
        DataLoss: naming the group and block of the first extent that differs. Nothing copied may be used.
    """
    source = landing.data
    for placement in placements:
        extent, target = placement.extent, placement.destination.data
        if extent.size <= _PIECE_BYTES:
            target[:] = source[extent.offset : extent.end]
            found = xxhash.xxh3_64_intdigest(target)
        else:
            found = _copy_pieces(target, source[extent.offset : extent.end])
        if found != extent.digest:
            raise DataLoss(
                f"{_name(extent)} has digest {found:016x}, its receipt says {extent.digest:016x}", field="digest"
            )


def _copy_pieces(target: memoryview, source: memoryview) -> int:
    """Digest of what arrived in `target`."""
    seal = xxhash.xxh3_64()
    for start in range(0, len(target), _PIECE_BYTES):
        piece = target[start : start + _PIECE_BYTES]
        piece[:] = source[start : start + _PIECE_BYTES]
        seal.update(piece)
    return seal.intdigest()


def _name(extent: Extent) -> str:
    return f"group {extent.group} block {extent.block}"
