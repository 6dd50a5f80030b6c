"""Keeping: the folder of `--kv-dir`, which outlives a stack. Knows what a later stack needs to find there."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from fabric.errors import StartError

_SALT_FILE = "salt"
_BLOCKS = "blocks"


def blocks(folder: Path) -> Path:
    """Where the kvstore keeps its records: a folder of its own, for it trusts every segment in there."""
    return folder / _BLOCKS


def salt(folder: Path) -> str:
    """The secret that tenants' keys are derived from, made by the first stack: another one would find nothing.

    Raises:
        StartError: it can be read by others, or not at all.
    """
    path = folder / _SALT_FILE
    try:
        _make(path)
        if path.stat().st_mode & 0o077:
            raise StartError(f"others may read {path}", field="--kv-dir", fix=f"chmod 600 {path}, or delete it")
        found = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        fix = "name a folder of your own"
        raise StartError(f"{path} cannot be read: {error}", field="--kv-dir", fix=fix) from error
    if not found:
        raise StartError(f"{path} is empty", field="--kv-dir", fix="delete it: what was stored is then found no more")
    return found


def _make(path: Path) -> None:
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(secrets.token_urlsafe(24))
            file.flush()
            os.fsync(descriptor)
