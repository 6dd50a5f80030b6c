"""RGB pixels to the patches that the tower takes: fitted into a planned box, centred on grey. Knows no weights."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from engine.families.v41.vision.config import ImageLimits
from engine.families.v41.vision.sizing import Plan, stretches

_GREY = 127


def patches(image: Image.Image, plan: Plan, limits: ImageLimits) -> torch.Tensor:
    """Patches bf16 [patch_rows * patch_columns, 3 * patch * patch] in -1 .. 1, row by row; colours outermost."""
    box = (plan.width, plan.height)
    fit = box if stretches(*image.size, limits) else _fitted(image.size, box)
    canvas = _canvas(image.resize(fit, Image.Resampling.BICUBIC), plan)
    values = (torch.from_numpy(canvas.astype(np.float32)).permute(2, 0, 1) / 255 - 0.5) / 0.5
    side = limits.patch
    tiles = values.reshape(3, plan.patch_rows, side, plan.patch_columns, side).permute(1, 3, 0, 2, 4)
    return tiles.reshape(plan.patch_rows * plan.patch_columns, -1).to(torch.bfloat16)


def _fitted(size: tuple[int, int], box: tuple[int, int]) -> tuple[int, int]:
    """The largest size of the image's proportions inside the box; at least one pixel either way."""
    (width, height), (across, down) = size, box
    if width / height > across / down:
        return across, max(1, round(height / width * across))
    if width / height < across / down:
        return max(1, round(width / height * down)), down
    return box


def _canvas(image: Image.Image, plan: Plan) -> np.ndarray:
    """uint8 [height, width, 3] with the image in its middle."""
    canvas = np.full((plan.height, plan.width, 3), _GREY, np.uint8)
    left, top = round((plan.width - image.width) * 0.5), round((plan.height - image.height) * 0.5)
    canvas[top : top + image.height, left : left + image.width] = np.asarray(image)
    return canvas
