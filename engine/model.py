"""Model facts: what callers may know of the loaded model, and the identity of its weights. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from engine.errors import InvalidParameter
from engine.images import ImageInput
from engine.layout import Layout

SUMS_FILE = "SHA256SUMS"
_HASHED_WHOLE_BYTES = 2**30
_SAMPLE_BYTES = 2**20
_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of one loaded model. `revision` changes with any of its files: it is part of every prefix key."""

    name: str
    revision: str
    family: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    layout: Layout
    image_input: ImageInput | None = None  # None: takes text alone


def model_revision(model_dir: Path) -> str:
    """Hex BLAKE3 over every file that decides what tokens mean and what comes out.

    Those are all `*.json` (config, tokenizer, shard index, Engram's token map) and SHA256SUMS, byte for byte, and the
    weights. Up to 1 GiB of weights every byte counts; above, each file's size, its first MiB (which holds the
    safetensors header) and evenly spaced samples do, so that a large model still opens quickly. A SHA256SUMS in the
    folder speaks for the bytes between the samples; `deepinfer doctor --deep` proves it. Raises InvalidParameter if
    there is no config.
    """
    if not (model_dir / "config.json").is_file():
        raise InvalidParameter("model_dir", f"{model_dir / 'config.json'} is missing", "name a model's folder")
    weights = sorted(model_dir.glob("*.safetensors"))
    small = sorted([*model_dir.glob("*.json"), *model_dir.glob(SUMS_FILE)])
    whole = sum(path.stat().st_size for path in weights) <= _HASHED_WHOLE_BYTES
    digest = blake3()
    for path in (*small, *weights):
        digest.update(f"{path.name}:{path.stat().st_size}\n".encode())
        if whole or path in small:
            digest.update_mmap(path)
        else:
            _sample(path, digest)
    return digest.hexdigest()


def _sample(path: Path, digest: blake3) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        for sample in range(_SAMPLES):
            file.seek(sample * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
