"""Parsing options cross processes as opaque bytes."""

from __future__ import annotations

import pytest

from fabric.errors import InvalidArgument
from services.recipe import options
from services.recipe.options import ParsingOptions


def test_options_survive_the_way_to_another_process() -> None:
    given = ParsingOptions(stage="reasoning_start", tools=True, starts_in_tools=False, json_output=True)
    assert options.load(options.dump(given)) == given


def test_no_options_mean_plain_text() -> None:
    assert options.load(b"") == ParsingOptions()


@pytest.mark.parametrize(
    "packed",
    [
        b"x",
        b"[]",
        b"{}",
        options.dump(ParsingOptions()).replace(b'"version":1', b'"version":2'),
        options.dump(ParsingOptions()).replace(b"false", b"0", 1),
        options.dump(ParsingOptions())[:-1] + b',"more":1}',
        b"[" * 50_000,
        b" " * 70_000,
    ],
)
def test_foreign_bytes_are_refused(packed: bytes) -> None:
    with pytest.raises(InvalidArgument) as caught:
        options.load(packed)
    assert caught.value.field == "parsing_options"
