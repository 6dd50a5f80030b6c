"""Faults that pydantic finds, in our words: what is wrong with a value and how to right it. Never quotes the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_KINDS = {
    "string": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "dict": "an object",
    "model": "an object",
    "dataclass": "an object",
    "path": "a path",
    "none_required": "null",
}
# Of pydantic's kinds of faults those that are about a value's size; what stands in braces is in the fault's context.
_BOUNDS = {
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "too_short": "{min_length} or more entries",
    "too_long": "at most {max_length} entries",
    "string_too_short": "{min_length} or more characters",
    "string_too_long": "at most {max_length} characters",
    "int_parsing_size": "a smaller number",
    "finite_number": "a number that is finite",
}
_ENDINGS = ("_attributes_type", "_sub_type", "_type", "_parsing", "_from_float", "_unicode")


class Words(NamedTuple):
    """What is wrong, and the fix."""

    message: str
    fix: str


def words(kind: str, context: Mapping[str, Any]) -> Words:
    """`kind` and `context` are `type` and `ctx` of one of a ValidationError's errors."""
    match kind:
        case "missing":
            return Words("missing", "send it")
        case "extra_forbidden":
            return Words("unknown field", "remove it, or check its spelling")
        case "literal_error" | "enum":
            return Words("not an accepted value", f"use {context.get('expected', 'another value')}")
        case "string_pattern_mismatch":
            return Words("not of the form that is accepted", f"use text that matches {context.get('pattern', '')}")
        case "value_error" | "assertion_error":  # raised by validators of ours
            return Words(str(context.get("error", "not accepted")), "make the fields agree")
    if kind in _BOUNDS:
        plain = {name: f"{value:.15g}" if isinstance(value, float) else value for name, value in context.items()}
        return Words("out of range", f"use {_BOUNDS[kind].format_map(plain)}")
    stem = next((kind.removesuffix(ending) for ending in _ENDINGS if kind.endswith(ending)), kind)
    if stem in _KINDS:
        return Words(f"not {_KINDS[stem]}", f"use {_KINDS[stem]}")
    return Words("not an accepted value", "see what is accepted")
