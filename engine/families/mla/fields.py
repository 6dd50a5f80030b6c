"""Typed access to the keys of a config.json: every mistake names its key. Knows no family."""

from __future__ import annotations

import math
from typing import Any

from engine.checkpoint.errors import CheckpointError

_RESTORE = "restore the published config.json"


def wrong(key: str, message: str, fix: str) -> CheckpointError:
    """The error for one key."""
    return CheckpointError(message, file="config.json", item=key, fix=fix)


class Fields:
    """One JSON object; `values` is the object itself. Every method raises CheckpointError for a value that is wrong."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def expect(self, key: str, accepted: tuple[object, ...]) -> None:
        """The value is absent, null, or one of `accepted`."""
        value = self.values.get(key)
        if value is not None and value not in accepted:
            raise wrong(key, f"{value!r} is not supported", f"use {' or '.join(map(repr, accepted))}")

    def count(self, key: str) -> int:
        """A positive integer."""
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise wrong(key, f"{value!r} is not a positive integer", _RESTORE)
        return value

    def count_or_zero(self, *keys: str) -> int:
        """The first of `keys` that is given: an integer of at least 0. 0 if none is."""
        for key in keys:
            value = self.values.get(key)
            if value is not None:
                return self.count(key) if value else 0
        return 0

    def number(self, key: str, default: float) -> float:
        """A positive finite number."""
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise wrong(key, f"{value!r} is not a positive number", _RESTORE)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise wrong(key, f"{value!r} is neither true nor false", _RESTORE)
        return value

    def kinds(self, key: str, count: int, known: tuple[str, ...]) -> list[str] | None:
        """A list of `count` names out of `known`; None if absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count:
            found = len(value) if isinstance(value, list) else repr(value)
            raise wrong(key, f"{found} entries for {count} layers", "list one per layer")
        if unknown := {str(name) for name in value} - set(known):
            raise wrong(key, f"{sorted(unknown)} unknown", f"use {' or '.join(known)}")
        return value

    def tokens(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them; empty if absent or null."""
        given = self.values.get(key)
        listed = given if isinstance(given, list) else [] if given is None else [given]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in listed):
            raise wrong(key, f"{given!r} is not a token id or a list of them", _RESTORE)
        return tuple(listed)
