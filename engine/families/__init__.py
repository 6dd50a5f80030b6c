"""What a model family is, and the opening of a folder as one: the registry names the families. Runs nothing."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.folder import Folder
from engine.checkpoint.heap import large_buffers_returned
from engine.families.check import check
from engine.families.registry import architecture, package_of

if TYPE_CHECKING:  # names and configs are also read where no torch is
    import torch

    from engine.batch import RaggedBatch
    from engine.cache.pool import CachePool
    from engine.checkpoint.progress import Progress
    from engine.families.draft import Draft
    from engine.images import ImageInput
    from engine.layout import Layout
    from kernels import Ops
__all__ = ["Family", "TakesImages", "architecture", "open_family"]


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
    check(folder)
    import_module("engine.families.whole").check_whole(folder)  # with torch, which names and configs do without
    module = import_module(f"{package_of(folder.config)}.model")
    with large_buffers_returned():
        family: Family = module.load(folder, dtype, batch_invariant, ops, block_tokens, progress)
    return family
