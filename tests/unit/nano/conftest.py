"""Shared pieces of nano's tests: the committed tokenizer's renderer and a tiny configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from models.nano.config import NanoConfig, load_config
from models.nano.data.render import Renderer
from models.nano.tokenizer import load


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return Renderer(load())


@pytest.fixture
def tiny() -> NanoConfig:
    """Every mechanism at real rates (window 128, ratios 4 and 128), little of everything else."""
    return replace(
        load_config(),
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=32,
        o_lora_rank=32,
        compress_ratios=(0, 4, 128, 4),
        index_n_heads=16,
        index_head_dim=32,
        index_topk=16,
        n_routed_experts=4,
        moe_intermediate_size=32,
        num_hash_layers=1,
        vocab_size=256,
    )
