"""Reference outputs of V4.1 and their checkpoints: the small ones stand in tests/data, others beside the repository."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.batch import RaggedBatch
from engine.checkpoint.folder import Folder
from engine.families.v41.model import V41, load
from engine.families.v41.options import Options
from kernels import choose
from tests.support.tiny import BLOCK_TOKENS

DATA = Path(__file__).parents[3] / "data" / "v41"
_REPOSITORY = Path(__file__).parents[4]
_VARIABLE = "DEEPINFER_V41_FIXTURES"
Tensors = dict[str, torch.Tensor]
EXACT = Options()


def larger() -> Path:
    """The folder of the fixtures that are too large for the repository; skips the test without it."""
    folder = Path(os.environ.get(_VARIABLE, _REPOSITORY.parent / "shared" / "spec" / "fixtures"))
    if not (folder / "v41-tiny").is_dir():
        pytest.skip(f"the larger V4.1 fixtures are not at {folder}; set {_VARIABLE}")
    return folder


def tensors(path: Path) -> Tensors:
    return load_file(path)


def opened(folder: Path, kernels: str = "cpu", options: Options = EXACT, dtype: torch.dtype = torch.float32) -> V41:
    """The checkpoint in `folder`, served as `options` say."""
    source = Folder(folder)
    source.config = source.config | {"serving": {name: getattr(options, name) for name in Options.__dataclass_fields__}}
    return load(source, dtype, False, choose(kernels), BLOCK_TOKENS, None)


def asking(batch: RaggedBatch, rows: Sequence[int]) -> RaggedBatch:
    """The batch, asking for the logits of `rows` only."""
    return replace(batch, logit_rows=np.array(rows, np.int64))


def flash_config() -> dict[str, object]:
    return json.loads((DATA / "flash-config.json").read_text(encoding="utf-8"))
