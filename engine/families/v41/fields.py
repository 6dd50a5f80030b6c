"""Values of a config dictionary, each checked for its kind and refused by its name. Knows no model."""

from __future__ import annotations

import math
from typing import Any

from engine.checkpoint.errors import CheckpointError

_RESTORE = "restore the published config.json"


def refusal(key: str, message: str, fix: str = _RESTORE) -> CheckpointError:
    """The error for one key of config.json."""
    return CheckpointError(message, file="config.json", item=key, fix=fix)


class Fields:
    """Reads keys of one dictionary. Every reader raises CheckpointError naming the key for a value of another kind."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def count(self, key: str) -> int:
        """A positive integer."""
        value = self.values.get(key)
        if not _is_integer(value) or value < 1:
            raise refusal(key, f"{value!r} is not a positive integer")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise refusal(key, f"{value!r} is not a positive number")
        return float(value)

    def whole(self, key: str, default: int, below: int) -> int:
        """An integer in 0 .. below - 1."""
        value = self.values.get(key, default)
        if not _is_integer(value) or not 0 <= value < below:
            raise refusal(key, f"{value!r} is not an integer in 0 .. {below - 1}")
        return int(value)

    def ascending(self, key: str, below: int) -> tuple[int, ...]:
        """Distinct integers in 0 .. below - 1, in ascending order; may be empty."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(_is_integer(item) and 0 <= item < below for item in value):
            raise refusal(key, f"{value!r} is not a list of numbers in 0 .. {below - 1}")
        if sorted(set(value)) != value:
            raise refusal(key, f"{value!r} is not in ascending order")
        return tuple(value)

    def flag(self, key: str) -> bool:
        """True or false; false where the key is absent."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise refusal(key, f"{value!r} is neither true nor false", "write true or false")
        return value

    def expect(self, expected: dict[str, Any], who: str) -> None:
        """Refuses a key of `expected` that is present with another value."""
        for key, value in expected.items():
            if self.values.get(key, value) != value:
                raise refusal(key, f"{self.values[key]!r} is not supported", f"{who} has {value!r}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
