"""The header of one safetensors file: names, types, shapes and byte ranges, each checked. Reads no tensor."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.errors import CheckpointError

_LENGTH_BYTES = 8
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
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(_LENGTH_BYTES)
        length = int.from_bytes(first, "little")
        if len(first) < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
            raise CheckpointError("the header does not fit into the file", file=path, fix=_TRUNCATED)
        text = file.read(length)
    data_bytes = size - _LENGTH_BYTES - length
    try:
        fields = {name: value for name, value in json.loads(text).items() if name != "__metadata__"}
        entries = {name: _entry(path, name, value, data_bytes) for name, value in fields.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"the header is not valid: {error}", file=path, fix=_TRUNCATED) from error
    return Header(_LENGTH_BYTES + length, entries)


def _entry(path: Path, name: str, fields: dict[str, object], data_bytes: int) -> Entry:
    stored, shape, (begin, end) = str(fields["dtype"]), fields["shape"], fields["data_offsets"]  # type: ignore[misc]
    if stored not in TYPE_BYTES:
        fix = f"store it as one of {', '.join(TYPE_BYTES)}"
        raise CheckpointError(f"type {stored} is not supported", file=path, item=name, fix=fix)
    shape = tuple(int(n) for n in shape)  # type: ignore[attr-defined]
    if not 0 <= begin <= end <= data_bytes:
        message = f"bytes {begin} to {end} lie outside the file's {data_bytes}"
        raise CheckpointError(message, file=path, item=name, fix=_TRUNCATED)
    if end - begin != math.prod(shape) * TYPE_BYTES[stored]:
        message = f"{end - begin} bytes do not hold {stored} {list(shape)}"
        raise CheckpointError(message, file=path, item=name, fix=_TRUNCATED)
    return Entry(stored, shape, begin, end)
