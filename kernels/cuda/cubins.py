"""Compiled CUDA kernels kept on disk, by everything that decides what they are. Knows no compiler and no GPU."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

_SUFFIX, _UNUSED_S = ".cubin", 30 * 86_400.0
_LENGTH_BYTES = 8


def place_of(source: Path, options: Sequence[str], compiler: str) -> Path:
    """Where the kernel of these options is kept: named by its source, the headers beside it and the compiler.

    `compiler` is its name and version. The folder is `deepinfer/cubins` in XDG_CACHE_HOME, or in ~/.cache.
    """
    digest = hashlib.blake2b("\0".join([compiler, *options]).encode(), digest_size=16)
    for file in (source, *sorted(source.parent.glob("*.cuh"))):
        digest.update(b"\0" + file.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "deepinfer" / "cubins" / f"{source.stem}-{digest.hexdigest()}{_SUFFIX}"


def read(place: Path) -> tuple[bytes, str] | None:
    """Machine code and the compiler's log; None where there are none."""
    try:
        kept = place.read_bytes()
        os.utime(place)
    except OSError:
        return None
    end = _LENGTH_BYTES + int.from_bytes(kept[:_LENGTH_BYTES], "little")
    return kept[end:], kept[_LENGTH_BYTES:end].decode(errors="replace")


def write(place: Path, cubin: bytes, log: str) -> None:
    """Keep them; kernels that nobody has read for a month go. A folder that takes nothing costs time, and no error."""
    told = log.encode()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
            file.write(len(told).to_bytes(_LENGTH_BYTES, "little") + told + cubin)
        Path(file.name).replace(place)  # whole or not at all: another process may look
        _sweep(place.parent, time.time() - _UNUSED_S)
    except OSError:
        return


def _sweep(folder: Path, before: float) -> None:
    for path in folder.glob(f"*{_SUFFIX}"):
        if path.stat().st_mtime < before:
            path.unlink(missing_ok=True)
