"""V4.1's images against recorded outputs: files to embeddings, and prompts with images. Computes no reference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from bench.parity_prefix import BAR, CONTROL_BAR
from bench.parity_run import difference, fresh, open_tiny, piece
from bench.table import Row
from engine.families import Family
from engine.families.v41.vision.encoder import Encoder, encode, load_encoder
from engine.families.v41.vision.patches import patches
from engine.families.v41.vision.picture import DEFAULT_BOUNDS, decode
from engine.families.v41.vision.sizing import plan
from engine.families.v41.vision.span import roles, span
from engine.families.v41.vision.tower import align, tower
from engine.images import ImageRows

SHIPPED = Path(__file__).parents[1] / "tests" / "data" / "v41" / "vision-tiny"
VISION_BAR = 1e-4
Tensors = dict[str, torch.Tensor]


def vision_rows() -> Iterator[Row]:
    """Each step on its recorded input, and the whole from the files; the worst of all images."""
    encoder, expected = load_encoder(SHIPPED / "checkpoint"), load_file(SHIPPED / "reference.safetensors")
    images = json.loads((SHIPPED / "images.json").read_text(encoding="utf-8"))
    files = [(SHIPPED / image["file"]).read_bytes() for image in images]
    steps = [_steps(data, index, encoder, expected) for index, data in enumerate(files)]
    label = f"v41 vision, {len(files)} images"
    for name, bar in (("patches", 0.0), ("roles", 0.0), ("span", 0.0), ("tower", VISION_BAR), ("aligner", VISION_BAR)):
        yield Row(f"{label}: {name}", max(step[name] for step in steps), "", bar)
    encoded = [torch.from_numpy(encode(data, encoder).rows) for data in files]
    whole = max(difference(rows, expected[f"span_{index}"]) for index, rows in enumerate(encoded))
    yield Row(f"{label}: files to spans", whole, "", VISION_BAR)
    alike = (expected["span_2"] - expected["span_3"]).abs().max()
    yield Row("v41 vision: one image held against another of as many tokens", float(alike), "", CONTROL_BAR, ">=")


def _steps(data: bytes, index: int, encoder: Encoder, expected: Tensors) -> dict[str, float]:
    """Deviations of one image, step by step."""
    image, config, weights = decode(data, DEFAULT_BOUNDS), encoder.config, encoder.weights
    planned = plan(image.width, image.height, config.limits)
    wanted = {name: expected[f"{name}_{index}"] for name in ("patches", "vit", "aligner", "roles", "span")}
    cut = patches(image, planned, config.limits)
    return {
        "patches": difference(cut.float(), wanted["patches"].float()),
        "roles": difference(torch.from_numpy(roles(planned)), wanted["roles"]),
        "span": difference(span(wanted["aligner"], planned, weights.markers), wanted["span"]),
        "tower": difference(tower(wanted["patches"], planned, config, weights), wanted["vit"]),
        "aligner": difference(align(wanted["vit"], planned, config, weights), wanted["aligner"]),
    }


def prompt_rows(label: str, kernels: str, fixtures: Path) -> Iterator[Row]:
    """Prompts of text and images, the worst of all chunkings; without the images' rows the answer must be another."""
    expected = load_file(fixtures / "v41-vision-tiny" / "text-image-logits.safetensors")
    spans = load_file(SHIPPED / "reference.safetensors")
    family, _ = open_tiny(fixtures / "v41-tiny", kernels)
    image_token = json.loads((fixtures / "v41-tiny" / "config.json").read_text(encoding="utf-8"))["image_token_id"]
    blind = 0.0
    for case in range(sum(name.startswith("ids_") for name in expected)):
        tokens, logits = expected[f"ids_{case}"], expected[f"logits0_{case}"]
        values = torch.cat([spans[f"span_{number}"] for number in expected[f"images_{case}"].tolist()])
        images = ImageRows(np.flatnonzero(tokens == image_token), values.numpy())
        worst = max(difference(_run(family, tokens, images, chunk), logits) for chunk in (len(tokens), 1, 3, 7, 16))
        yield Row(f"{label}, prompt of text and images {case}, worst of all chunkings", worst, "", BAR)
        blind = max(blind, difference(_run(family, tokens, None, len(tokens)), logits))
    yield Row(f"{label}, prompts whose images are left out", blind, "", CONTROL_BAR, ">=")


def _run(family: Family, tokens: torch.Tensor, images: ImageRows | None, chunk: int) -> torch.Tensor:
    pool, logits = fresh(family), []
    for at in range(0, len(tokens), chunk):
        batch = piece(tokens[at : at + chunk].tolist(), at)
        if images is not None:
            here = (images.at >= at) & (images.at < at + chunk)
            rows = ImageRows(images.at[here] - at, images.values[here])
            batch = replace(batch, images=rows if here.any() else None)
        logits.append(family.forward(batch, pool))
    return torch.cat(logits)
