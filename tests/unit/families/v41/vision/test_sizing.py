"""Every image gets the size and the token count of the published transform, whatever its proportions."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.errors import CheckpointError
from engine.errors import InvalidParameter
from engine.families.v41.vision.config import ImageLimits, parse_vision
from engine.families.v41.vision.sizing import Plan, plan
from tests.unit.families.v41.vision.material import DATA, flash_config


def published() -> ImageLimits:
    parsed = parse_vision(flash_config())
    assert parsed is not None
    return parsed.limits


def rows(name: str) -> Iterator[dict[str, int | None]]:
    with (DATA / name).open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield {key: int(value) if value else None for key, value in row.items()}


def compared(found: Plan, row: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    wanted = ("pixel_height", "pixel_width", "grid_rows", "grid_cols", "tokens")
    return (found.height, found.width, found.rows, found.columns, found.tokens), tuple(row[key] for key in wanted)


def test_every_size_of_the_published_config_equals_the_reference() -> None:
    count = 0
    for count, row in enumerate(rows("image-sizing.csv"), 1):  # noqa: B007  read after the loop
        found = plan(row["width"], row["height"], published())
        got, wanted = compared(found, row)
        assert got == wanted, row
        assert (found.patch_rows, found.patch_columns) == (row["vit_rows"], row["vit_cols"]), row
    assert count == 1020


def test_the_recipe_counts_otherwise_in_the_known_corner_alone() -> None:
    """What a gateway must not count with: the recipe's rule, for images 14.9 times as long as wide."""
    differing = [row for row in rows("image-sizing.csv") if row["tokens"] != row["recipe_tokens"]]
    assert len(differing) == 17
    for row in differing:
        assert max(row["width"], row["height"]) / min(row["width"], row["height"]) > 14.8


def test_every_size_of_other_limits_equals_the_reference() -> None:
    count = 0
    for count, row in enumerate(rows("image-sizing-small-config.csv"), 1):  # noqa: B007  read after the loop
        limits = ImageLimits(14, 3, row["max_image_tokens"], row["min_pixels"], row["max_wh_ratio"])
        got, wanted = compared(plan(row["width"], row["height"], limits), row)
        assert got == wanted, row
    assert count == 200


@pytest.mark.parametrize(
    ("height", "width", "grid", "tokens"),
    [
        (224, 224, (13, 13), 184), (544, 544, (13, 13), 184), (1080, 1920, (23, 41), 968),
        (768, 1024, (19, 25), 496), (4000, 3000, (36, 27), 1010),
    ],
)  # fmt: skip
def test_published_examples_take_their_published_tokens(
    height: int, width: int, grid: tuple[int, int], tokens: int
) -> None:
    found = plan(width, height, published())
    assert ((found.rows, found.columns), found.tokens) == (grid, tokens)


sides = st.integers(1, 200_000)


@given(sides, sides, st.integers(4, 1024), st.integers(1, 400_000), st.sampled_from([None, 0.3, 1.0, 2.5, 8.0]))
def test_no_image_takes_more_than_the_limit(w: int, h: int, most: int, least: int, ratio: float | None) -> None:
    limits = ImageLimits(14, 3, most, least, ratio)
    try:
        found = plan(w, h, limits)
    except InvalidParameter as error:
        assert (error.field, bool(error.fix)) == ("image", True)
    else:
        assert 4 <= found.tokens <= most
        assert found.height % 14 == found.width % 14 == 0


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (-1, 5)])
def test_an_image_without_pixels_is_refused(width: int, height: int) -> None:
    with pytest.raises(InvalidParameter, match="image"):
        plan(width, height, published())


def changed(**vision: Any) -> dict[str, Any]:
    config = flash_config()
    return {**config, "vision_config": {**config["vision_config"], **vision}}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"patch_size": 0}, "patch_size"),
        ({"num_attention_heads": 24}, "num_attention_heads"),
        ({"num_attention_heads": 512}, "num_attention_heads"),
        ({"max_image_tokens": 3}, "max_image_tokens"),
        ({"max_wh_ratio": -1}, "max_wh_ratio"),
        ({"min_pixels": None}, "min_pixels"),
        ({"rope_theta": "x"}, "rope_theta"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_vision(changed(**changes))
    assert (caught.value.file, caught.value.item) == ("config.json", key)


def test_a_model_without_the_section_has_no_vision() -> None:
    config = flash_config()
    del config["vision_config"]
    assert parse_vision(config) is None
    with pytest.raises(CheckpointError, match="vision_config"):
        parse_vision({**config, "vision_config": []})
