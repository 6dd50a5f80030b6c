"""One safetensors file, memory-mapped and checked before use. Knows bytes, names and shapes; dequantizes nothing."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.checkpoint.errors import CheckpointError

_HEADER_BYTES = 8
_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,  # read as bytes: a numeric copy would destroy the exponents
    "U8": torch.uint8,
    "I8": torch.uint8,  # packed FP4 is stored as I8 and means bits
    "I32": torch.int32,
    "I64": torch.int64,
}
_TRUNCATED = "download the file again: it is cut short or damaged"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a shard: its type as stored, its shape, and its bytes within the data part."""

    stored: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Shard:
    """Maps the file; tensors are views of the mapping (copy on write), so reading one touches only its own pages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        header_bytes = self._header_bytes(size)
        self._data = np.memmap(path, dtype=np.uint8, mode="c")
        self.entries = self._entries(header_bytes, size - _HEADER_BYTES - header_bytes)
        self._first = _HEADER_BYTES + header_bytes

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as stored; E8M0 scales and packed FP4 come as uint8."""
        entry = self.entries[name]
        raw = torch.from_numpy(self._data[self._first + entry.begin : self._first + entry.end])
        if not len(raw):
            return torch.empty(entry.shape, dtype=_TYPES[entry.stored])
        dtype = _TYPES[entry.stored]
        aligned = raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()
        return aligned.view(dtype).view(entry.shape)

    def _header_bytes(self, size: int) -> int:
        with self.path.open("rb") as file:
            first = file.read(_HEADER_BYTES)
        length = int.from_bytes(first, "little")
        if len(first) < _HEADER_BYTES or length > size - _HEADER_BYTES:
            raise CheckpointError("the header does not fit into the file", file=self.path, fix=_TRUNCATED)
        return length

    def _entries(self, header_bytes: int, data_bytes: int) -> dict[str, Entry]:
        try:
            header = json.loads(bytes(self._data[_HEADER_BYTES : _HEADER_BYTES + header_bytes]))
            return {
                name: self._entry(name, fields, data_bytes) for name, fields in header.items() if name != "__metadata__"
            }
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(f"the header is not valid: {error}", file=self.path, fix=_TRUNCATED) from error

    def _entry(self, name: str, fields: dict[str, object], data_bytes: int) -> Entry:
        stored, shape, (begin, end) = str(fields["dtype"]), fields["shape"], fields["data_offsets"]  # type: ignore[misc]
        if stored not in _TYPES:
            fix = f"store it as one of {', '.join(_TYPES)}"
            raise CheckpointError(f"type {stored} is not supported", file=self.path, item=name, fix=fix)
        shape = tuple(int(n) for n in shape)  # type: ignore[attr-defined]
        if not 0 <= begin <= end <= data_bytes:
            message = f"bytes {begin} to {end} lie outside the file's {data_bytes}"
            raise CheckpointError(message, file=self.path, item=name, fix=_TRUNCATED)
        if end - begin != math.prod(shape) * _TYPES[stored].itemsize:
            message = f"{end - begin} bytes do not hold {stored} {list(shape)}"
            raise CheckpointError(message, file=self.path, item=name, fix=_TRUNCATED)
        return Entry(stored, shape, begin, end)
