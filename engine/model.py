"""Model facts: what callers may know of the loaded model, and the identity of its weights. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from engine.errors import InvalidParameter
from engine.layout import Layout

_HASHED_WHOLE_BYTES = 2**30
_SAMPLE_BYTES = 2**20
_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of one loaded model. `revision` changes with any weight: it is part of every prefix key."""

    name: str
    revision: str
    family: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    layout: Layout


def model_revision(model_dir: Path) -> str:
    """Hex BLAKE3 over config and weight files.

    Up to 1 GiB every byte counts; above, each file's size, its first MiB (which holds the safetensors header) and
    evenly spaced samples do, so that a large model still opens quickly. Raises InvalidParameter if there is no config.
    """
    config = model_dir / "config.json"
    if not config.is_file():
        raise InvalidParameter("model_dir", f"{config} is missing", "point it at a model directory")
    weights = sorted(model_dir.glob("*.safetensors"))
    whole = sum(path.stat().st_size for path in weights) <= _HASHED_WHOLE_BYTES
    digest = blake3(config.read_bytes())
    for path in weights:
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        if whole:
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
