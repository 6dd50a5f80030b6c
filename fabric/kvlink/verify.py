"""Digests of canonical bytes, and copies that are checked where they arrive. Knows xxh3-64 and nothing of slabs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from fabric.errors import DataLoss, InvalidArgument
from fabric.kvlink.credit import cut
from fabric.kvlink.link import Bytes
from fabric.records import Extent

DIGEST_KIND = "xxh3-64"
# A piece that stays in the processor's second-level cache between the copy and the hash.
_PIECE_BYTES = 256 << 10
# Up to here a copy keeps the interpreter, for 8 microseconds: giving it up and waiting for it again takes longer.
_SMALL_BYTES = 64 << 10

# Where an extent's bytes go: one run of live memory, or several that follow each other in the extent. uint8 [n] each.
Destination = Bytes | tuple[Bytes, ...]
# Offset in a landing, bytes, digest, live memory: a `Placement` without the objects, for many of them.
CopyRow = tuple[int, int, int, Destination]
# Many rows at once, uint64 [n, 4]: offset, bytes, digest, and the address of live memory that its maker vouches for.
CopyTable = NDArray[np.uint64]
CopyRows = Sequence[CopyRow] | CopyTable
# A compiled `copy_rows`: (address, uint64 [n, 4] of offset from there, bytes, digest, and address that they go to)
# -> number of the first row whose copy differs, or -1. Hashes what it stores; runs without the interpreter.
CopyKernel = Callable[[int, CopyTable], int]
_BYTE = np.dtype(np.uint8)
KERNEL_BYTES = 241  # xxh3 of less has another definition, which no kernel needs to know


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
        reason = _misfit(row_of(placement), landing_bytes)
        if reason:
            raise InvalidArgument(f"{_name(placement.extent)} {reason}", field="extents")


def total_bytes(rows: CopyRows) -> int:
    """Bytes of all rows."""
    return int(rows[:, 1].sum()) if isinstance(rows, np.ndarray) else sum([size for _, size, _, _ in rows])


def parts(rows: CopyRows, most_bytes: int) -> list[tuple[int, int]]:
    """Rows [first, end) in order, each part of `most_bytes` bytes at most or of one row."""
    sizes = rows[:, 1] if isinstance(rows, np.ndarray) else [size for _, size, _, _ in rows]
    return cut(np.asarray(sizes, np.int64), most_bytes)


def check_rows(rows: CopyRows, landing_bytes: int) -> None:
    """As `check_placements`; the error tells the number of the row."""
    if isinstance(rows, np.ndarray):
        wrong = (rows[:, 1] < KERNEL_BYTES) | (rows[:, 1] > landing_bytes) | (rows[:, 0] > landing_bytes - rows[:, 1])
        if wrong.any():
            reason = f"leaves its landing of {landing_bytes} bytes"
            raise InvalidArgument(f"extent {wrong.argmax()} {reason}", field="extents")
        return
    for index, row in enumerate(rows):
        offset, size, _, to = row
        fits = size > 0 and 0 <= offset <= landing_bytes - size
        if fits and isinstance(to, np.ndarray) and to.shape == (size,) and to.dtype is _BYTE and to.flags.c_contiguous:
            continue  # all is well; what follows takes longer
        reason = _misfit(row, landing_bytes)
        if reason:
            raise InvalidArgument(f"extent {index} {reason}", field="extents")


def copy_verified(landing: Bytes, placements: Sequence[Placement]) -> None:
    """Copies every extent to its destination and checks the digest of what arrived there.

    Raises:
        DataLoss: naming the group and block of the first extent that differs. Nothing copied may be used.
    """
    wrong = copy_rows(landing, [row_of(placement) for placement in placements])
    if wrong is not None:
        raise mismatch(placements[wrong])


def mismatch(placement: Placement) -> DataLoss:
    """The error for an extent whose copy has another digest."""
    extent, found = placement.extent, digest(placement.destination)
    return DataLoss(f"{_name(extent)} has digest {found:016x}, its receipt says {extent.digest:016x}", field="digest")


def row_of(placement: Placement) -> CopyRow:
    extent = placement.extent
    return extent.offset, extent.size, extent.digest, placement.destination


def copy_rows(landing: Bytes, rows: CopyRows, kernel: CopyKernel | None = None) -> int | None:
    """Copies every row to its destination. Returns the number of one whose copy has another digest, if there is one.

    The destination is what is hashed: a writer that changes the landing during the copy is caught as well. A table of
    rows needs a kernel.
    """
    if isinstance(rows, np.ndarray):
        if kernel is None:
            raise TypeError("a table of rows is copied by a kernel")
        wrong = kernel(landing.ctypes.data, rows)
        return wrong if wrong >= 0 else None
    if kernel is None:
        return _copy_each(landing, range(len(rows)), rows)
    fit = [index for index, (_, size, _, to) in enumerate(rows) if size >= KERNEL_BYTES and not isinstance(to, tuple)]
    if fit:
        chosen = rows if len(fit) == len(rows) else [rows[index] for index in fit]
        table = [(at, size, seal, addressof(c_char.from_buffer(to))) for at, size, seal, to in chosen]  # type: ignore[arg-type]
        wrong = kernel(landing.ctypes.data, np.array(table, np.uint64))
        if wrong >= 0:
            return fit[wrong]
    rest = set(range(len(rows))).difference(fit) if len(fit) < len(rows) else ()
    return _copy_each(landing, sorted(rest), rows)


def _copy_each(landing: Bytes, indices: Sequence[int], rows: Sequence[CopyRow]) -> int | None:
    """Piece by piece, so that the hash reads what the copy left in the processor's cache."""
    source = landing.data
    for index in indices:
        offset, size, wanted, destination = rows[index]
        if isinstance(destination, tuple):
            found = _scatter(destination, landing[offset : offset + size])
        elif size <= _SMALL_BYTES:
            target = destination.data
            target[:] = source[offset : offset + size]
            found = xxhash.xxh3_64_intdigest(target)
        else:
            found = _copy_pieces(destination, landing[offset : offset + size])
        if found != wanted:
            return index
    return None


def _misfit(row: CopyRow, landing_bytes: int) -> str:
    """Why a row cannot be copied; empty where it can."""
    offset, size, _, destination = row
    if offset < 0 or size <= 0 or offset + size > landing_bytes:
        return f"leaves its landing of {landing_bytes} bytes"
    runs = destination if isinstance(destination, tuple) else (destination,)
    if sum([len(run) for run in runs]) != size or not all(map(_is_run, runs)):
        return "does not match its destination"
    return ""


def _is_run(memory: Bytes) -> bool:
    return memory.ndim == 1 and memory.dtype == np.uint8 and bool(memory.flags.c_contiguous)


def _scatter(targets: tuple[Bytes, ...], source: Bytes) -> int:
    """Digest of what arrived in `targets`, one after the other."""
    seal, at = xxhash.xxh3_64(), 0
    for target in targets:
        np.copyto(target, source[at : at + len(target)])
        seal.update(target.data)
        at += len(target)
    return seal.intdigest()


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
