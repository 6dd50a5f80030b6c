"""The random model asks for every tensor once, and a tensor that is drawn twice is no model."""

from __future__ import annotations

import pytest
import torch

from bench import engine_gpu_model
from bench.engine_gpu_model import RandomReader, random_model
from kernels.reference import OPS

_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def test_the_model_is_drawn_tensor_by_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_gpu_model, "SHAPE", {**engine_gpu_model.SHAPE, **_SMALL})
    model = random_model(OPS, seed=0, layers=3)
    assert len(model.config.dense) == 3


def test_a_tensor_that_is_asked_for_twice_is_named() -> None:
    reader = RandomReader(0, torch.device("cpu"))
    reader.floats("norm.weight", 4)
    reader.finish()
    reader.floats("norm.weight", 4)
    with pytest.raises(ValueError, match=r"norm\.weight"):
        reader.finish()
