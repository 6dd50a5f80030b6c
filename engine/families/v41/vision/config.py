"""V4.1's vision configuration, checked field by field. Knows no tensors and no pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.families.fields import Fields, refusal

SECTION = "vision_config"
_SMALLEST_SPAN = 4  # start, one image token, its newline, end


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What decides the size an image is brought to, and so how many tokens it takes."""

    patch: int  # pixels of a patch's side
    merge: int  # patches of a token's side
    max_tokens: int  # of one span, with its markers
    min_pixels: int  # smaller images are enlarged
    max_wh_ratio: float | None  # wider images are taken as this wide; None: no bound

    @property
    def cell(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The tower, the aligner above it, and the sizes of its images."""

    layers: int
    hidden: int
    heads: int
    inner: int
    rope_theta: float
    embedding: int  # numbers of an image token: the text model's hidden size
    limits: ImageLimits

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def patch_numbers(self) -> int:
        """Numbers of one patch: three colours."""
        return 3 * self.limits.patch**2


def parse_vision(config: dict[str, Any]) -> VisionConfig | None:
    """The `vision_config` of a model's config.json; None for a model without one.

    Raises CheckpointError naming the key for anything missing, of the wrong kind, or contradictory.
    """
    section = config.get(SECTION)
    if section is None:
        return None
    if not isinstance(section, dict):
        raise refusal(SECTION, f"{section!r} is not a section")
    fields, text = Fields(section), Fields(config.get("text_config", config))
    parsed = VisionConfig(
        layers=fields.count("num_hidden_layers"),
        hidden=fields.count("hidden_size"),
        heads=fields.count("num_attention_heads"),
        inner=fields.count("intermediate_size"),
        rope_theta=fields.number("rope_theta"),
        embedding=text.count("hidden_size"),
        limits=_limits(fields),
    )
    if parsed.hidden % parsed.heads or parsed.head_dim % 4:
        raise refusal("num_attention_heads", f"{parsed.heads} heads of {parsed.hidden} have no width divisible by 4")
    return parsed


def _limits(fields: Fields) -> ImageLimits:
    ratio = fields.values.get("max_wh_ratio")
    limits = ImageLimits(
        patch=fields.count("patch_size"),
        merge=fields.count("downsample_ratio"),
        max_tokens=fields.count("max_image_tokens"),
        min_pixels=fields.count("min_pixels"),
        max_wh_ratio=None if ratio is None else fields.number("max_wh_ratio"),
    )
    if limits.max_tokens < _SMALLEST_SPAN:
        raise refusal("max_image_tokens", f"{limits.max_tokens} hold no image", f"use at least {_SMALLEST_SPAN}")
    return limits
