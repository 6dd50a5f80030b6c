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
_PIECE_BYTES = 256 << 10
# Up to here a copy keeps the interpreter, for 8 microseconds: giving it up and waiting for it again takes longer.
_SMALL_BYTES = 64 << 10


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
    piece, so that the hash reads what the copy left in the processor's cache.

    Raises:
        DataLoss: naming the group and block of the first extent that differs. Nothing copied may be used.
    """
    source = landing.data
    for placement in placements:
        extent = placement.extent
        if extent.size <= _SMALL_BYTES:
            target = placement.destination.data
            target[:] = source[extent.offset : extent.end]
            found = xxhash.xxh3_64_intdigest(target)
        else:
            found = _copy_pieces(placement.destination, landing[extent.offset : extent.end])
        if found != extent.digest:
            raise DataLoss(
                f"{_name(extent)} has digest {found:016x}, its receipt says {extent.digest:016x}", field="digest"
            )


def _copy_pieces(target: Bytes, source: Bytes) -> int:
    """Digest of what arrived in `target`; other threads run during every copy."""
    seal = xxhash.xxh3_64()
    for start in range(0, len(target), _PIECE_BYTES):
        piece = target[start : start + _PIECE_BYTES]
        np.copyto(piece, source[start : start + _PIECE_BYTES])
        seal.update(piece.data)
    return seal.intdigest()


def _name(extent: Extent) -> str:
    return f"group {extent.group} block {extent.block}"
