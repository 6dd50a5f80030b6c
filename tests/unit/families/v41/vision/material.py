"""The reference images: files, what the published transform and tower make of them, and the encoder under test."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from engine.families.v41.vision.encoder import Encoder, load_encoder

Tensors = dict[str, torch.Tensor]
DATA = Path(__file__).parents[4] / "data" / "v41"
IMAGES = DATA / "vision-tiny"
CHECKPOINT = IMAGES / "checkpoint"
COUNT = 6


@cache
def encoder() -> Encoder:
    return load_encoder(CHECKPOINT)


@cache
def reference() -> Tensors:
    return load_file(IMAGES / "reference.safetensors")


@cache
def listed() -> list[dict[str, Any]]:
    """Per image: file, sizes, grids and token count."""
    return json.loads((IMAGES / "images.json").read_text(encoding="utf-8"))


def flash_config() -> dict[str, Any]:
    return json.loads((DATA / "flash-config.json").read_text(encoding="utf-8"))


def image_bytes(index: int) -> bytes:
    return (IMAGES / listed()[index]["file"]).read_bytes()
