"""Model families by architecture name: one module and one line here each. Opens folders; runs nothing."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.folder import Folder
from engine.checkpoint.reader import Progress
from engine.families.draft import Draft
from engine.images import ImageInput
from engine.layout import Layout
from kernels import Ops

_FAMILIES = {
    "DeepseekV2ForCausalLM": "engine.families.mla",
    "DeepseekV3ForCausalLM": "engine.families.mla",
    "DeepseekV32ForCausalLM": "engine.families.mla",
    "DeepseekV4ForCausalLM": "engine.families.v4",
    "DeepseekV41ForCausalLM": "engine.families.v41",
}
_MODEL_TYPES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "deepseek_v41": "DeepseekV41ForCausalLM",
}


class Family(Protocol):
    """A loaded model: its facts, its cache layout, and its forward."""

    name: str
    layout: Layout
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    kernels: str  # name of the kernels in use
    draft: Draft | None  # None: the checkpoint carries none, or none that is known here

    def forward(self, batch: RaggedBatch, cache: CachePool) -> torch.Tensor:
        """Logits fp32 [len(batch.logit_rows), vocab_size]; every new KV record is in the cache when it returns."""


@runtime_checkable
class TakesImages(Protocol):
    """What a family with vision has besides: its `forward` puts `batch.images` in the place of their tokens."""

    image_input: ImageInput | None  # None: this checkpoint takes text alone


def open_family(
    model_dir: Path,
    dtype: torch.dtype,
    batch_invariant: bool,
    ops: Ops,
    block_tokens: int = 128,
    progress: Progress | None = None,
) -> Family:
    """Load the model in `model_dir` for compute type `dtype` (float32 or bfloat16).

    `block_tokens` is raised to the next multiple of every compress rate. Raises CheckpointError, naming file and
    tensor, for what cannot be served, and for `batch_invariant` with operators that are not.
    """
    folder = Folder(model_dir)
    if batch_invariant and not ops.batch_invariant:
        message, fix = f"the {ops.name} kernels are not batch invariant", "choose kernels=cpu"
        raise CheckpointError(message, file=model_dir, item="batch_invariant", fix=fix)
    module = import_module(_FAMILIES[architecture(folder.config)])
    family: Family = module.load(folder, dtype, batch_invariant, ops, block_tokens, progress)
    return family


def architecture(config: dict[str, Any]) -> str:
    """The architecture a config names, by `architectures` or `model_type`. Raises CheckpointError if none is known."""
    named = config.get("architectures")
    listed = list(named) if isinstance(named, list) else []
    for candidate in [*listed, _MODEL_TYPES.get(str(config.get("model_type")), "")]:
        if candidate in _FAMILIES:
            return str(candidate)
    message = f"{listed or config.get('model_type')!r} is not served here"
    fix = f"use a model of {', '.join(_FAMILIES)}"
    raise CheckpointError(message, file="config.json", item="architectures", fix=fix)
