"""V4.1 at its published size: cache formats, Engram, totals, image sizes, against records that ship. Runs no model."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from bench.table import Row
from engine.cache.records.blocks import ENTRY_FP4, INDEX_FP4, WINDOW_FP8, BlockFormat
from engine.families.v41.config import parse
from engine.families.v41.hashing import NOTHING, EngramHash
from engine.families.v41.normalise import normalise
from engine.families.v41.records import global_bytes_per_token, window_bytes_per_sequence
from engine.families.v41.vision.config import ImageLimits, parse_vision
from engine.families.v41.vision.sizing import plan

SHIPPED = Path(__file__).parents[1] / "tests" / "data" / "v41"
PUBLISHED_BYTES_PER_TOKEN, PUBLISHED_WINDOW_BYTES = 890, 40 * 67_584
PUBLISHED_ENGRAM_ROWS = (384_006_168, 384_016_682)
FORMATS = {
    "window FP8": ("fp8_block32", "fp8_scale", WINDOW_FP8),
    "entry FP4": ("fp4_block16_e4m3", "fp4_e4m3_scale", ENTRY_FP4),
    "index key FP4": ("fp4_block32_e8m0", "fp4_e8m0_scale", INDEX_FP4),
}
SIZES = ("pixel_height", "pixel_width", "grid_rows", "grid_cols", "tokens")
Tensors = dict[str, torch.Tensor]


def format_rows() -> Iterator[Row]:
    """The three cache formats on recorded cases: differing values and scales."""
    cases = load_file(SHIPPED / "quant-cases.safetensors")
    for name, (values, scales, form) in FORMATS.items():
        codes, packed = form.encode(cases["x"])
        wrong = _differing(form.decode(codes, packed), cases[values]) + _differing(
            form.scale_value(packed), cases[scales]
        )
        yield Row(f"v41 {name}: differing values and scales", wrong, "", 0)
    yield Row("v41 entries in the index keys' format: differing values", _crossed(INDEX_FP4, cases), "", 1, ">=")


def _crossed(form: BlockFormat, cases: Tensors) -> int:
    return _differing(form.rounded(cases["x"]), cases["fp4_block16_e4m3"])


def engram_rows() -> Iterator[Row]:
    """Engram at its published size: primes, offsets, multipliers, table rows, normalised strings."""
    expected = load_file(SHIPPED / "engram-hash.safetensors")
    engram = parse(json.loads((SHIPPED / "flash-config.json").read_text(encoding="utf-8"))).engram
    if engram is None:
        raise ValueError("the published config has no Engram")
    hashing = EngramHash(engram, 2)
    parts = {"primes": expected["primes"].flatten(1), "offsets": expected["offsets"]}
    for name, wanted in {**parts, "multipliers": expected["multipliers"]}.items():
        yield Row(f"v41 Engram {name}: differing", _differing(torch.from_numpy(getattr(hashing, name)), wanted), "", 0)
    cases = [name.removeprefix("rows_") for name in expected if name.startswith("rows_")]
    wrong, careless = 0, 0
    for case in cases:
        classes, dead = expected[f"classes_{case}"], expected[f"dead_{case}"].bool()
        wrong += _differing(_hashed(hashing, classes.masked_fill(dead, NOTHING)), expected[f"rows_{case}"])
        careless += _differing(_hashed(hashing, classes), expected[f"rows_{case}"])
    yield Row(f"v41 Engram rows of {len(cases)} sequences: differing", wrong, "", 0)
    yield Row("v41 Engram rows that reach across images: differing", careless, "", 1, ">=")
    strings = json.loads((SHIPPED / "engram-normalise.json").read_text(encoding="utf-8"))["cases"]
    wrong = sum(normalise(text) != key for text, key in strings)
    yield Row(f"v41 Engram, {len(strings)} normalised strings: differing", wrong, "", 0)


def _hashed(hashing: EngramHash, classes: torch.Tensor) -> torch.Tensor:
    longest = hashing.multipliers.shape[1]
    padded = torch.cat([torch.full((longest - 1,), NOTHING, dtype=classes.dtype), classes])
    recent = torch.stack([padded[longest - 1 - back : len(padded) - back] for back in range(longest)], 1)
    return torch.from_numpy(hashing.rows(recent.numpy()))


def published_rows(path: Path | None) -> Iterator[Row]:
    """Totals that the publication gives, from the published configuration."""
    config = parse(json.loads((path or SHIPPED / "flash-config.json").read_text(encoding="utf-8")))
    apart = abs(global_bytes_per_token(config) - PUBLISHED_BYTES_PER_TOKEN)
    yield Row(f"v41 published config: bytes per token, apart from {PUBLISHED_BYTES_PER_TOKEN}", apart, "", 0)
    apart = abs(window_bytes_per_sequence(config) - PUBLISHED_WINDOW_BYTES)
    yield Row(f"v41 published config: window bytes, apart from {PUBLISHED_WINDOW_BYTES:,}", apart, "", 0)
    counted = EngramHash(config.engram, 2).table_rows if config.engram else (0, 0)
    for layer, found_rows, wanted in zip(("first", "second"), counted, PUBLISHED_ENGRAM_ROWS, strict=True):
        apart = abs(found_rows - wanted)
        yield Row(f"v41 published config: {layer} Engram table's rows, apart from {wanted:,}", apart, "", 0)


def image_rows() -> Iterator[Row]:
    """Sizes and token counts of images, under the published limits and under others."""
    vision = parse_vision(json.loads((SHIPPED / "flash-config.json").read_text(encoding="utf-8")))
    if vision is None:
        raise ValueError("the published config has no vision")
    sized = _sizes("image-sizing.csv")
    wrong = sum(_size(size, vision.limits) != tuple(size[name] for name in SIZES) for size in sized)
    yield Row(f"v41 published config, {len(sized):,} image sizes and token counts: differing", wrong, "", 0)
    unlike = sum(size["tokens"] != size["recipe_tokens"] for size in sized)
    yield Row("v41 image token counts, held against another rule's: differing", unlike, "", 1, ">=")
    others, wrong = _sizes("image-sizing-small-config.csv"), 0
    for size in others:
        limits = ImageLimits(14, 3, size["max_image_tokens"] or 0, size["min_pixels"] or 0, size["max_wh_ratio"])
        wrong += _size(size, limits) != tuple(size[name] for name in SIZES)
    yield Row(f"v41 other limits, {len(others)} image sizes and token counts: differing", wrong, "", 0)


def _sizes(name: str) -> list[dict[str, int | None]]:
    with (SHIPPED / name).open(encoding="utf-8") as file:
        return [{key: int(value) if value else None for key, value in row.items()} for row in csv.DictReader(file)]


def _size(size: dict[str, int | None], limits: ImageLimits) -> tuple[int, ...]:
    found = plan(size["width"] or 0, size["height"] or 0, limits)
    return found.height, found.width, found.rows, found.columns, found.tokens


def _differing(one: torch.Tensor, other: torch.Tensor) -> int:
    return int((one != other).sum()) if one.shape == other.shape else max(one.numel(), other.numel())
