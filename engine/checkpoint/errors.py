"""The checkpoint error: which file, which tensor or config key, and what to do. Knows no format."""

from __future__ import annotations

from pathlib import Path

from engine.errors import EngineError


class CheckpointError(EngineError):
    """A model folder that cannot be served as it is. `file` and `item` (tensor or config key) say where."""

    def __init__(self, message: str, *, file: Path | str, item: str = "", fix: str) -> None:
        self.file, self.item = str(file), item
        super().__init__(message, field=f"{file}: {item}" if item else str(file), fix=fix)
