"""What a kvstore needs of its settings before it opens anything: transport, index and a directory of its own."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from fabric import preflight
from fabric.errors import StartError
from fabric.kvlink import check_link
from services.kvstore.index import open_index
from services.kvstore.nvme.files import refused
from services.kvstore.settings import KvStoreSettings


def check(settings: KvStoreSettings) -> None:
    """Raises StartError where a setting cannot be met; names it and the fix. Contacts no index and makes no file."""
    check_link(settings.transport)
    preflight.memory({"memory_mb": settings.memory_mb, "landing_mb": settings.landing_mb})
    open_index(settings.index.get_secret_value(), settings.index_ttl_s, time.monotonic)
    if settings.nvme_dir is not None:
        _check_folder(settings.nvme_dir)


def _check_folder(folder: Path) -> None:
    """It can be made and written, and no other kvstore has it."""
    made = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not made.is_dir() or not os.access(made, os.W_OK | os.X_OK):
        message = f"{folder}: {made} is no directory that can be written"
        raise StartError(message, field="nvme_dir", fix="name a writable directory")
    try:
        lock = os.open(folder / "lock", os.O_RDWR)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StartError(f"{folder}: {error.strerror}", field="nvme_dir", fix="name a writable directory") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise refused(folder, error) from error
    finally:
        os.close(lock)
