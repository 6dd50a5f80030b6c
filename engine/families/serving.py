"""The `serving` section of config.json: switches for what a family's makers leave open. Knows no family."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from engine.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SECTION = "serving"


def flags(config: dict[str, Any], options: type[DataclassInstance]) -> dict[str, bool]:
    """True or false for every field of the dataclass `options`, false where absent.

    Raises CheckpointError naming the key for anything else, and for a switch that the family does not have.
    """
    section = config.get(SECTION, {})
    if not isinstance(section, dict):
        raise _refusal(SECTION, f"{section!r} is not a section", "write an object of switches")
    known = [field.name for field in fields(options)]
    if unknown := sorted(set(section) - set(known)):
        raise _refusal(SECTION, f"{unknown} unknown", f"use {', '.join(known)}" if known else "leave the section out")
    for key, value in section.items():
        if not isinstance(value, bool):
            raise _refusal(key, f"{value!r} is neither true nor false", "write true or false")
    return {key: section.get(key, False) for key in known}


def _refusal(item: str, message: str, fix: str) -> CheckpointError:
    return CheckpointError(message, file="config.json", item=item, fix=fix)
