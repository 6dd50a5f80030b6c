"""Free text and code for language: sources present in an ordinary Python environment. Knows no tokenizer."""

from __future__ import annotations

import importlib.util
import lzma
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGES = {
    "numpy": "BSD-3-Clause",
    "networkx": "BSD-3-Clause",
    "sympy": "BSD-3-Clause",
    "mpmath": "BSD-3-Clause",
    "starlette": "BSD-3-Clause",
    "rich": "MIT",
    "fastapi": "MIT",
    "pydantic": "MIT",
    "pytest": "MIT",
}
"""Permissively licensed packages whose .py files are read, after the standard library (PSF licence)."""
FILE_LIMIT_BYTES = 60_000
DOCUMENT_CHARACTERS = 4_000


def _python_files(root: Path) -> Iterator[Path]:
    skipped = ("test", "site-packages", "lib2to3", "__pycache__", "idlelib")
    for path in sorted(root.rglob("*.py")):
        if not any(part.startswith(skipped) for part in path.relative_to(root).parts):
            yield path


def source_roots() -> list[Path]:
    """The standard library and the packages of `PACKAGES` that are installed."""
    roots = [Path(sysconfig.get_paths()["stdlib"])]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            roots.append(Path(spec.origin).parent)
    return roots


def documents(limit_bytes: int, seed: int = 0) -> list[str]:
    """Pieces of files in a seeded order, about `limit_bytes` together; the language reference (pydoc topics) first."""
    roots = source_roots()
    topics = roots[0] / "pydoc_data" / "topics.py"
    files = [path for root in roots for path in _python_files(root) if path != topics]
    random.Random(seed).shuffle(files)
    pieces: list[str] = []
    total = 0
    for path in [topics, *files]:
        text = path.read_text(encoding="utf-8", errors="ignore")
        text = text if path == topics else text[:FILE_LIMIT_BYTES]
        pieces += [text[start : start + DOCUMENT_CHARACTERS] for start in range(0, len(text), DOCUMENT_CHARACTERS)]
        total += len(text)
        if total >= limit_bytes:
            break
    return pieces


def write_archive(path: Path, limit_bytes: int) -> None:
    """Keep the documents in one compressed file that travels to the training machine."""
    path.write_bytes(lzma.compress("\0".join(documents(limit_bytes)).encode()))


def read_archive(path: Path) -> list[str]:
    """Documents of `write_archive`."""
    return lzma.decompress(path.read_bytes()).decode().split("\0")
