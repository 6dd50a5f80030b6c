"""Stored bytes as tensors: views of the mapped file, and copies of parts of it. Dequantizes nothing."""

from __future__ import annotations

import numpy as np
import torch

from engine.checkpoint.folder import Folder
from engine.checkpoint.header import TYPE_BYTES
from engine.checkpoint.rank import Part

_AT_ONCE_BYTES = 1 << 22  # of the mapped file, while a tensor is copied
_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,  # read as bytes: a numeric copy would destroy the exponents
    "U8": torch.uint8,
    "I8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


def view(folder: Folder, name: str) -> torch.Tensor:
    """The tensor as stored, a view of the mapped file; E8M0 scales and packed FP4 come as uint8."""
    entry = folder.entry(name)
    dtype = _TYPES[entry.stored]
    if not entry.num_bytes:
        return torch.empty(entry.shape, dtype=dtype)
    raw = torch.from_numpy(folder.raw(name))
    aligned = raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()
    return aligned.view(dtype).view(entry.shape)


def read(folder: Folder, name: str, part: Part | None = None) -> torch.Tensor:
    """A copy of the tensor, or of a part of it, as stored.

    Pages of the file are given back as they are copied: this process holds the copy and 4 MiB more.
    """
    entry = folder.entry(name)
    dtype, size = _TYPES[entry.stored], TYPE_BYTES[entry.stored]
    if not entry.num_bytes:
        return torch.empty(entry.shape, dtype=dtype)
    rows = part.rows if part else range(entry.shape[0] if entry.shape else 1)
    width = entry.num_bytes // (entry.shape[0] if entry.shape else 1)
    columns = part.columns if part else None
    first, last = (columns.start * size, columns.stop * size) if columns is not None else (0, width)
    source, copy = folder.raw(name).reshape(-1, width), np.empty((len(rows), last - first), np.uint8)
    step = max(1, _AT_ONCE_BYTES // width)
    for row in range(0, len(rows), step):
        begin, end = rows.start + row, min(rows.start + row + step, rows.stop)
        copy[row : row + step] = source[begin:end, first:last]
        folder.forget(name)
    shape = (len(rows), *entry.shape[1:]) if entry.shape else ()
    if columns is not None:
        shape = (len(rows), len(columns))
    return torch.from_numpy(copy.reshape(-1)).view(dtype).view(shape)
