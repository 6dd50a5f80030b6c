"""The `serving` section of config.json, and widths that published records do not have. Knows no family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.checkpoint.errors import CheckpointError

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


def require_records(wanted: Mapping[str, tuple[int, Sequence[int]]]) -> None:
    """Raises CheckpointError for the first key of config.json whose value no published record has."""
    for key, (value, known) in wanted.items():
        if value not in known:
            told = f"{known[0]} to {known[-1]}" if isinstance(known, range) else " or ".join(map(str, known))
            message = f"{value}, and published records are of {told}"
            raise CheckpointError(message, file="config.json", item=key, fix="choose kv_cache=rows")


def _refusal(item: str, message: str, fix: str) -> CheckpointError:
    return CheckpointError(message, file="config.json", item=item, fix=fix)
