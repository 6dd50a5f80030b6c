"""JSON objects of a checkpoint, read with bounds. Knows text and files; knows no key."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from engine.checkpoint.errors import CheckpointError

_MOST_BYTES = 1 << 28  # a tokenizer of 130,000 tokens has 10 MB, an index of 50,000 tensors 5 MB


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError if it is missing or not one."""
    try:
        if not path.is_file():
            raise CheckpointError("the file is missing", file=path, fix=fix)
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise CheckpointError(f"{size:,} bytes are no such file", file=path, fix="restore the file")
        return parse(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"it cannot be read: {error.strerror}", file=path, fix="restore the file") from error
    except ValueError as error:
        raise CheckpointError(f"not valid JSON: {error}", file=path, fix="restore the file") from error


def parse(text: bytes) -> dict[str, Any]:
    """A JSON object from UTF-8. Raises ValueError for what is none, and for a key that an object gives twice."""
    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError("it is not an object")
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Readers differ in which of two values they take, so that neither is."""
    found = dict(pairs)
    if len(found) != len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{key!r} is there twice")
    return found
