"""One safetensors file, mapped when a tensor is first read. Knows bytes and pages; knows no tensor's meaning."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.checkpoint.header import read_header

Bytes = npt.NDArray[np.uint8]


class Shard:
    """Views of the mapping touch only their own pages; `forget` gives pages back, so that reading is streaming.

    The mapping is private: what is written to a view never reaches the file, and `forget` takes it back.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self.entries, self._first = header.entries, header.first
        self._mapping: mmap.mmap | None = None
        self._data: Bytes = np.empty(0, np.uint8)

    def raw(self, name: str) -> Bytes:
        """A tensor's bytes as they are stored, a view of the mapping."""
        if self._mapping is None:
            with self.path.open("rb") as file:
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._data = np.frombuffer(self._mapping, np.uint8)
        entry = self.entries[name]
        view: Any = self._data[self._first + entry.begin : self._first + entry.end]
        return view

    def forget(self) -> None:
        """All pages of the file leave this process; reading one again maps it anew.

        The whole file, since the system maps pages around those that are touched, too.
        """
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)
