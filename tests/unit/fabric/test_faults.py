"""Whatever pydantic finds is told in our words; an unknown kind is told as well, without its words."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, StringConstraints, ValidationError

from fabric.faults import words


class Everything(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    above: Annotated[float, Field(gt=0.5)] = 1
    least: Annotated[int, Field(ge=2)] = 2
    below: Annotated[float, Field(lt=2.0)] = 1
    most: Annotated[int, Field(le=2)] = 2
    few: Annotated[list[int], Field(min_length=1, max_length=2)] = [1]
    text: Annotated[str, StringConstraints(min_length=1, max_length=2)] = "x"
    form: Annotated[str, StringConstraints(pattern="^a$")] = "a"
    one: Literal["a", "b"] = "a"
    flag: bool = True
    tree: dict[str, int] = {}
    nothing: None = None


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("above", 0.5, ("out of range", "use above 0.5")),
        ("above", math.inf, ("out of range", "use a number that is finite")),
        ("least", 1, ("out of range", "use at least 2")),
        ("least", 2.5, ("not a whole number", "use a whole number")),
        ("below", 2.0, ("out of range", "use below 2")),
        ("most", 3, ("out of range", "use at most 2")),
        ("few", [], ("out of range", "use 1 or more entries")),
        ("few", [1, 2, 3], ("out of range", "use at most 2 entries")),
        ("few", "ab", ("not a list", "use a list")),
        ("text", "", ("out of range", "use 1 or more characters")),
        ("text", "abc", ("out of range", "use at most 2 characters")),
        ("text", 3, ("not text", "use text")),
        ("form", "b", ("not of the form that is accepted", "use text that matches ^a$")),
        ("one", "c", ("not an accepted value", "use 'a' or 'b'")),
        ("flag", 1, ("not true or false", "use true or false")),
        ("tree", [], ("not an object", "use an object")),
        ("nothing", 3, ("not null", "use null")),
        ("other", 3, ("unknown field", "remove it, or check its spelling")),
    ],
)
def test_a_fault_is_told_with_what_is_accepted(name: str, value: Any, says: tuple[str, str]) -> None:
    with pytest.raises(ValidationError) as caught:
        Everything.model_validate({name: value})
    fault = caught.value.errors()[0]
    assert words(fault["type"], fault.get("ctx", {})) == says


def test_a_kind_that_nobody_foresaw_is_told_without_its_own_words() -> None:
    assert words("something_new", {"a": 1}).message == "not an accepted value"
