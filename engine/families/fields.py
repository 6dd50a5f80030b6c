"""Typed access to the keys of a config.json: every mistake names its key. Knows no family."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.errors import CheckpointError
from engine.families.yarn import Rope, Yarn

_RESTORE = "restore the published config.json"
MOST_LAYERS, MOST_EXPERTS = 512, 2048  # several times any published model, and few enough to list every tensor
MOST_TIMES = 1024  # of whatever else is built or done once for each
_MOST = (1 << 31) - 1
_FP32 = (1.2e-38, 3.4e38)  # the least and the most that the compute type holds in full


def refusal(key: str, message: str, fix: str = _RESTORE) -> CheckpointError:
    """The error for one key of config.json."""
    return CheckpointError(message, file="config.json", item=key, fix=fix)


class Fields:
    """One JSON object; `values` is the object itself. Every method raises CheckpointError for a value that is wrong."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def expect(self, accepted: dict[str, tuple[object, ...]]) -> None:
        """Each key is absent, null, or one of its accepted values."""
        for key, known in accepted.items():
            value = self.values.get(key)
            if value is not None and value not in known:
                raise refusal(key, f"{value!r} is not supported", f"use {' or '.join(map(repr, known))}")

    def count(self, key: str, most: int = _MOST) -> int:
        """A positive integer of at most `most`."""
        value = self.values.get(key)
        if not is_integer(value) or value < 1:
            raise refusal(key, f"{_shown(value)} is not a positive integer")
        if value > most:
            raise refusal(key, f"{_shown(value)} is more than the {most:,} that are served")
        return int(value)

    def count_or_zero(self, *keys: str, most: int = _MOST) -> int:
        """The first of `keys` that is given: an integer in 0 .. most. 0 if none is."""
        for key in keys:
            value = self.values.get(key)
            if value is not None:
                return 0 if is_integer(value) and value == 0 else self.count(key, most)
        return 0

    def section(self, key: str) -> dict[str, Any]:
        """An object; empty where the key is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise refusal(key, f"{_shown(value)} is not a section")
        return value or {}

    def whole(self, key: str, default: int, below: int) -> int:
        """An integer in 0 .. below - 1."""
        value = self.values.get(key, default)
        if not is_integer(value) or not 0 <= value < below:
            raise refusal(key, f"{value!r} is not an integer in 0 .. {below - 1}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _FP32[0] <= value <= _FP32[1]:
            raise refusal(key, f"{_shown(value)} is not a positive number")
        return float(value)

    def base(self, key: str, default: float | None = None) -> float:
        """The base of a rotary table: a number above 1."""
        value = self.number(key, default)
        if value <= 1:
            raise refusal(key, f"{value!r} is not a base")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise refusal(key, f"{value!r} is neither true nor false", "write true or false")
        return value

    def kinds(self, key: str, count: int, known: tuple[str, ...]) -> list[str] | None:
        """A list of `count` names out of `known`; None if absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count:
            found = len(value) if isinstance(value, list) else repr(value)
            raise refusal(key, f"{found} entries for {count} layers", "list one per layer")
        if unknown := {str(name) for name in value} - set(known):
            raise refusal(key, f"{sorted(unknown)} unknown", f"use {' or '.join(known)}")
        return value

    def ascending(self, key: str, below: int) -> tuple[int, ...]:
        """Distinct integers in 0 .. below - 1, in ascending order; may be empty."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(is_integer(item) and 0 <= item < below for item in value):
            raise refusal(key, f"{value!r} is not a list of numbers in 0 .. {below - 1}")
        if sorted(set(value)) != value:
            raise refusal(key, f"{value!r} is not in ascending order")
        return tuple(value)

    def tokens(self, key: str, default: int | None = None) -> tuple[int, ...]:
        """A token id or a list of them; `default`, or none, where the key is absent or null."""
        given = self.values.get(key, default)
        listed = given if isinstance(given, list) else [] if given is None else [given]
        if not all(is_integer(token) and token >= 0 for token in listed):
            raise refusal(key, f"{given!r} is not a token id or a list of them")
        return tuple(listed)


def rope_of(theta: float, scaling: dict[str, Any], key: str) -> Rope:
    """A rotary table whose scaling is YaRN or none. `key` is what an error names."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rope(theta, None)
    if kind != "yarn":
        raise refusal(key, f"type {kind!r} is not supported", "these models use yarn or none")
    for needed in ("factor", "original_max_position_embeddings"):
        if scaling.get(needed) is None:
            raise refusal(key, f"{needed} is missing")
    read = Fields(scaling)
    original = read.count("original_max_position_embeddings")
    return Rope(
        theta, Yarn(read.number("factor"), original, read.number("beta_fast", 32.0), read.number("beta_slow", 1.0))
    )


def _shown(value: object) -> str:
    """A value as an error quotes it, cut short."""
    return repr(value)[:100]


def is_integer(value: Any) -> bool:
    """Whether a JSON value is an integer; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)
