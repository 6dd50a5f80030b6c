"""The header of one safetensors file: names, types, shapes and byte ranges, each checked. Reads no tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from engine.checkpoint.document import parse
from engine.checkpoint.errors import CheckpointError

_LENGTH_BYTES = 8
_MOST_BYTES = 100_000_000  # of a header, as the safetensors library bounds it
_MOST_NUMBERS = 1 << 48  # of a tensor: 256 times the largest published table, and far from what 64 bits hold
_TRUNCATED = "download the file again: it is cut short or damaged"
TYPE_BYTES = {
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "U8": 1,
    "I8": 1,  # packed FP4 is stored as I8 and means bits
    "I32": 4,
    "I64": 8,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a shard: its type as stored, its shape, and its bytes within the data part."""

    stored: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Its stored size."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """All tensors of a shard. `first`: where in the file the data part begins."""

    first: int
    entries: dict[str, Entry]


def read_header(path: Path) -> Header:
    """Raises CheckpointError naming the file, and the tensor where there is one, for whatever does not add up."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(_LENGTH_BYTES)
            length = int.from_bytes(first, "little")
            if len(first) < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MOST_BYTES):
                raise CheckpointError("the header does not fit into the file", file=path, fix=_TRUNCATED)
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"it cannot be read: {error.strerror}", file=path, fix="restore it") from error
    data_bytes = size - _LENGTH_BYTES - length
    try:
        fields = parse(text)
    except ValueError as error:
        raise CheckpointError(f"the header is not valid: {error}", file=path, fix=_TRUNCATED) from error
    entries = {name: _entry(path, name, value, data_bytes) for name, value in fields.items() if name != "__metadata__"}
    _check_places(path, entries, data_bytes)
    return Header(_LENGTH_BYTES + length, entries)


def _entry(path: Path, name: str, fields: Any, data_bytes: int) -> Entry:
    def refusal(message: str, fix: str = _TRUNCATED) -> CheckpointError:
        return CheckpointError(message, file=path, item=name, fix=fix)

    found: list[Any] = (
        [fields.get(key) for key in ("dtype", "shape", "data_offsets")] if isinstance(fields, dict) else []
    )
    if len(found) != 3 or not (isinstance(found[0], str) and _are_sizes(found[1]) and _are_sizes(found[2], 2)):
        raise refusal("the header is not valid: it gives the tensor no type, shape and bytes")
    stored, shape, (begin, end) = found
    if stored not in TYPE_BYTES:
        raise refusal(f"type {stored} is not supported", f"store it as one of {', '.join(TYPE_BYTES)}")
    if not begin <= end <= data_bytes:
        raise refusal(f"bytes {begin} to {end} lie outside the file's {data_bytes}")
    if end - begin != math.prod(shape) * TYPE_BYTES[stored]:
        raise refusal(f"{end - begin} bytes do not hold {stored} {shape}")
    return Entry(stored, tuple(shape), begin, end)


def _are_sizes(value: object, count: int | None = None) -> bool:
    """Whether a JSON value is a list of that many sizes (any number, if None)."""
    if not isinstance(value, list) or len(value) != (len(value) if count is None else count):
        return False
    return all(type(size) is int and 0 <= size <= _MOST_NUMBERS for size in value)


def _check_places(path: Path, entries: dict[str, Entry], data_bytes: int) -> None:
    """Tensors follow one another and fill the file, as the format says: no byte is two tensors', or nobody's."""
    placed = sorted((entry.begin, entry.end, name) for name, entry in entries.items())
    ends = [(0, 0, ""), *placed, (data_bytes, data_bytes, "")]
    for (_, before, _), (begin, _, name) in pairwise(ends):
        if begin < before:
            raise CheckpointError("bytes of it are another tensor's too", file=path, item=name, fix=_TRUNCATED)
        if begin > before:
            message = f"{begin - before} bytes from {before} on are no tensor's"
            raise CheckpointError(message, file=path, item=name, fix=_TRUNCATED)
