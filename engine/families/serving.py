"""The `serving` section of config.json, and what a family is asked for and does not have. Knows no family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.checkpoint.errors import CheckpointError

if TYPE_CHECKING:  # switches are also read where no torch is
    from engine.checkpoint.folder import Folder
    from kernels import Ops

SECTION = "serving"


def flags(config: dict[str, Any], known: Sequence[str], on: Sequence[str] = ()) -> dict[str, bool]:
    """True or false for every switch in `known`; absent ones are false, except those in `on`.

    Raises CheckpointError naming the key for anything else, and for a switch that the family does not have.
    """
    section = config.get(SECTION, {})
    if not isinstance(section, dict):
        raise _refusal(SECTION, f"{section!r} is not a section", "write an object of switches")
    if unknown := sorted(set(section) - set(known)):
        raise _refusal(SECTION, f"{unknown} unknown", f"use {', '.join(known)}" if known else "leave the section out")
    for key, value in section.items():
        if not isinstance(value, bool):
            raise _refusal(key, f"{value!r} is neither true nor false", "write true or false")
    return {key: section.get(key, key in on) for key in known}


def refuse_records(ops: Ops, folder: Folder) -> None:
    """Raises CheckpointError where caches of published records are wanted of a family that has none here yet."""
    if ops.records:
        message, fix = "V2, V3 and V3.2 alone are cached as published records", "choose kv_cache=rows"
        raise CheckpointError(message, file=folder.path, item="kv_cache", fix=fix)


def _refusal(item: str, message: str, fix: str) -> CheckpointError:
    return CheckpointError(message, file="config.json", item=item, fix=fix)
