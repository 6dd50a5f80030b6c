"""The vision tower's weights: upstream tensors, gathered and checked. Knows names and shapes, runs nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.checkpoint.reader import Reader
from engine.families.v41.vision.config import VisionConfig

PREFIXES = ("vision.", "aligner.", "image_")  # of every tensor named here
_TEXT = ("embed.", "head.", "norm.", "layers.", "mtp.")


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix [out, in] in the compute type, and its fp32 bias [out] where it has one."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Block:
    """One transformer layer of the tower. `gate_up` holds the gate's rows, then those of the factor it gates."""

    attention_norm: torch.Tensor  # [hidden] fp32
    query_key_value: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Markers:
    """Learned embeddings, fp32 [embedding], of the positions that hold no picture."""

    start: torch.Tensor
    newline: torch.Tensor
    end: torch.Tensor


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """The tower, the aligner that merges its patches into tokens, and the markers."""

    patch: Linear
    blocks: tuple[Block, ...]
    norm: torch.Tensor
    merge: Linear
    project: Linear
    markers: Markers


def build(reader: Reader, config: VisionConfig, dtype: torch.dtype) -> VisionWeights:
    """Take every tensor of the vision part from `reader`, which refuses the ones left over; matrices in `dtype`."""
    builder = _Builder(reader, config, dtype)
    c, merged = config, config.hidden * config.limits.merge**2
    weights = VisionWeights(
        patch=builder.linear("vision.patch_embed.proj", c.hidden, c.patch_numbers),
        blocks=tuple(builder.block(f"vision.blocks.{index}") for index in range(c.layers)),
        norm=reader.floats("vision.norm.weight", c.hidden),
        merge=builder.linear("aligner.w1", c.embedding, merged),
        project=builder.linear("aligner.w2", c.embedding, c.embedding),
        markers=Markers(*(reader.floats(f"image_{role}", c.embedding) for role in ("start", "newline", "end"))),
    )
    reader.leave(*_TEXT)
    reader.finish()
    return weights


class _Builder:
    """Reads one part after another."""

    def __init__(self, reader: Reader, config: VisionConfig, dtype: torch.dtype) -> None:
        self._reader, self._config, self._dtype = reader, config, dtype

    def block(self, prefix: str) -> Block:
        c, read = self._config, self._reader.floats
        return Block(
            attention_norm=read(f"{prefix}.norm1.weight", c.hidden),
            query_key_value=self.linear(f"{prefix}.attn.wqkv", 3 * c.hidden, c.hidden),
            output=self.linear(f"{prefix}.attn.wo", c.hidden, c.hidden),
            mlp_norm=read(f"{prefix}.norm2.weight", c.hidden),
            gate_up=self.linear(f"{prefix}.mlp.w1", 2 * c.inner, c.hidden, biased=False),
            down=self.linear(f"{prefix}.mlp.w2", c.hidden, c.inner, biased=False),
        )

    def linear(self, name: str, outputs: int, inputs: int, biased: bool = True) -> Linear:
        weight = self._reader.floats(f"{name}.weight", outputs, inputs).to(self._dtype)
        return Linear(weight, self._reader.floats(f"{name}.bias", outputs) if biased else None)
