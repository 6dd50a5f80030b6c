"""The image encoder: bytes of an image file in, embeddings of its span out. Keeps nothing between images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.folder import Folder
from engine.checkpoint.reader import Progress, Reader
from engine.families.v41.names import upstream
from engine.families.v41.vision.config import SECTION, VisionConfig, parse_vision
from engine.families.v41.vision.patches import patches
from engine.families.v41.vision.picture import DEFAULT_BOUNDS, Bounds, decode
from engine.families.v41.vision.sizing import Plan, plan
from engine.families.v41.vision.span import span
from engine.families.v41.vision.tower import align, tower
from engine.families.v41.vision.weights import VisionWeights, build
from engine.model import model_revision

_HASH_CONTEXT = "deepinfer 2026-11 image content v1"


@dataclass(frozen=True, slots=True)
class Encoder:
    """A loaded vision part. `revision` changes with any weight of its checkpoint."""

    config: VisionConfig
    weights: VisionWeights
    revision: str
    bounds: Bounds


@dataclass(frozen=True, slots=True, eq=False)
class EncodedImage:
    """The span of one image: as many rows as tokens, to stand where the prompt has the image token."""

    rows: np.ndarray  # float32 [plan.tokens, embedding]
    digest: bytes  # 32 bytes: of the file's bytes and the encoder's revision
    plan: Plan


def load_encoder(
    folder: Path, dtype: torch.dtype = torch.float32, bounds: Bounds = DEFAULT_BOUNDS, progress: Progress | None = None
) -> Encoder:
    """The vision part of the checkpoint in `folder`, matrices in `dtype`; the text model stays on disk.

    Raises CheckpointError naming the file and the key or tensor for what is missing, misshapen or not finite.
    """
    source = Folder(folder)
    config = parse_vision(source.config)
    if config is None:
        fix = "use a checkpoint with a vision tower"
        raise CheckpointError("this model takes no images", file=folder / "config.json", item=SECTION, fix=fix)
    weights = build(Reader(source, upstream, progress), config, dtype)
    return Encoder(config, weights, model_revision(folder), bounds)


@torch.inference_mode()
def encode(data: bytes, encoder: Encoder) -> EncodedImage:
    """The same bytes and encoder give the same rows and digest.

    Raises InvalidParameter naming `image` for bytes that are no image, or one outside the bounds or the token limit.
    """
    image = decode(data, encoder.bounds)
    planned = plan(image.width, image.height, encoder.config.limits)
    states = tower(patches(image, planned, encoder.config.limits), planned, encoder.config, encoder.weights)
    rows = span(align(states, planned, encoder.config, encoder.weights), planned, encoder.weights.markers)
    return EncodedImage(rows.numpy(), content_hash(data, encoder.revision), planned)


def content_hash(data: bytes, revision: str) -> bytes:
    """BLAKE3-256 of an image file's bytes and of the encoder that reads it."""
    return blake3(data, key=blake3(revision.encode(), derive_key_context=_HASH_CONTEXT).digest()).digest()
