"""The size an image is brought to and the tokens it takes. Arithmetic on sides; sees no pixel.

The rule is the one of the published image transform. It scales a small image up once; a count that repeats the
scaling after rounding to whole patches finds up to 68 tokens fewer or more for images longer than 14.9 times their
other side. Whoever bills or places image tokens must count with `plan`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import InvalidParameter
from engine.families.v41.vision.config import ImageLimits

_MARKERS = 2  # start and end; every row of image tokens has a newline besides


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of one image: pixels [height, width], a grid of patches, and a grid of image tokens."""

    height: int
    width: int
    patch_rows: int
    patch_columns: int
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        """Tokens of the span: image tokens, a newline for each of their rows, start and end."""
        return _tokens(self.rows, self.columns)


def plan(width: int, height: int, limits: ImageLimits) -> Plan:
    """The plan for an image of `width` x `height` pixels.

    Raises InvalidParameter naming `image` for one that no size within the limits represents.
    """
    if width < 1 or height < 1:
        raise InvalidParameter("image", f"{width} x {height} pixels are none", "send an image with pixels")
    wide, high = _at_least(limits.min_pixels, *_bounded(width, height, limits.max_wh_ratio))
    patch = limits.patch
    found = _planned(math.ceil(high / patch) * patch, math.ceil(wide / patch) * patch, limits)
    if found.tokens > limits.max_tokens:
        found = _planned(*_shrunk(wide, high, limits), limits)
    if min(found.height, found.width) < 1 or found.tokens > limits.max_tokens:
        message = f"{width} x {height} pixels do not fit {limits.max_tokens} tokens"
        raise InvalidParameter("image", message, "send an image whose sides are more alike")
    return found


def stretches(width: int, height: int, limits: ImageLimits) -> bool:
    """Whether the image is squeezed into its box rather than fitted with its own proportions."""
    return limits.max_wh_ratio is not None and width >= limits.max_wh_ratio * height


def _planned(height: int, width: int, limits: ImageLimits) -> Plan:
    down, across = height // limits.patch, width // limits.patch
    return Plan(height, width, down, across, math.ceil(down / limits.merge), math.ceil(across / limits.merge))


def _tokens(rows: int, columns: int) -> int:
    return rows * (columns + 1) + _MARKERS


def _bounded(width: int, height: int, ratio: float | None) -> tuple[int, int]:
    return (width, height) if ratio is None else (max(1, min(width, int(height * ratio))), height)


def _at_least(pixels: int, width: int, height: int) -> tuple[int, int]:
    if width * height >= pixels:
        return width, height
    scale = math.sqrt(pixels / (width * height))
    return int(width * scale), int(height * scale)


def _shrunk(width: int, height: int, limits: ImageLimits) -> tuple[int, int]:
    """Height and width of the largest size of these proportions whose span is not too long."""
    ratio, cell, patch = height / width, limits.cell, limits.patch
    columns = math.sqrt((limits.max_tokens - _MARKERS) / ratio + 0.25) - 0.5  # columns * ratio rows fill the span
    rows = columns * ratio
    if columns < 1:
        return (limits.max_tokens - _MARKERS) // 2 * cell, cell
    if rows < 1:
        return cell, (limits.max_tokens - _MARKERS - 1) * cell
    scale = min(math.floor(columns) * cell / width, math.floor(rows) * cell / height)
    return math.floor(height * scale / patch) * patch, math.floor(width * scale / patch) * patch
